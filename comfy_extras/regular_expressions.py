"""Regular expressions that cannot stop the server.

`re` holds the interpreter's lock while it searches, and a pattern like ``(a+)+$`` takes time that
doubles with each letter of a text. So a search that could take long runs in a process of its own,
which has a time limit and ends when its prompt is cancelled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy_extras import regex_child

TIME_LIMIT_S = 10.0
POLL_S = 0.05
QUICK_STEPS = 2_000_000
"""Steps of a search that are done at once: some hundredths of a second."""


def worked_out(pattern: str, string: str, **request: Any) -> Any:
    """The result of a task of `regex_child`.

    Raises:
        ValueError: The pattern or the replacement is wrong, or the search takes too long.
        InterruptProcessingException: The prompt was cancelled meanwhile.
    """
    request |= {"pattern": pattern, "string": string}
    work = regex_child.answer if is_quick(pattern, string) else _in_a_process
    answer = work(request)
    fault = answer.get("fault")
    if fault is None:
        return answer["result"]
    raise ValueError(_REASONS[fault].format(reason=answer["reason"], **request))


_REASONS = {
    "regex_pattern": "regex_pattern: {pattern!r} is not a regular expression: {reason}",
    "replace": "replace: {replace!r} is no replacement for {pattern!r}: {reason}; write "
    r"\1 or \g<name> for a group that the pattern has, and \\ for a backslash",
    "length": "replace: {reason}; shorten the text or the replacement, or start the server with a "
    "larger --max-text-size",
    "memory": "regex_pattern: {pattern!r} cannot be searched for: {reason}; "
    "simplify the pattern or shorten the text",
}


def is_quick(pattern: str, string: str) -> bool:
    """Whether a search surely takes few steps.

    With one repetition and no alternatives there are as many places to begin at, and as many
    lengths to try, as the text has letters; each try looks at the pattern once.
    """
    repetitions = sum(map(pattern.count, "*+?"))
    is_simple = repetitions <= 1 and not any(letter in pattern for letter in "{|")
    return is_simple and (len(string) + 1) ** 2 * (len(pattern) + 1) <= QUICK_STEPS


def _in_a_process(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request, from a process that is gone afterwards."""
    throw_exception_if_processing_interrupted()
    body: bytes | None = json.dumps(request).encode()
    deadline = time.monotonic() + TIME_LIMIT_S
    command = [sys.executable, "-I", "-S", str(Path(regex_child.__file__))]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes) as child:
        try:
            while True:
                try:
                    output, _ = child.communicate(body, timeout=POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    throw_exception_if_processing_interrupted()
                    if time.monotonic() > deadline:
                        raise _too_long(request) from None
                    body = None  # it is on its way
        finally:
            child.kill()
    if child.returncode:
        reason = f"the search ended with status {child.returncode}"
        return {"fault": "memory", "reason": reason}
    return dict(json.loads(output))


def _too_long(request: dict[str, Any]) -> ValueError:
    return ValueError(
        f"regex_pattern: searching {len(request['string'])} characters for "
        f"{request['pattern']!r} took more than {TIME_LIMIT_S:g} s; avoid a repetition within a "
        "repetition, such as (a+)+, or shorten the text"
    )
