"""The regular expressions of the text nodes, computed by `re` on plain values.

Run as a program it reads one request from its standard input, as JSON, and writes the answer, so
that a search without end can be ended from outside. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import re
import sys
from typing import Any

MEMORY_BYTES = 4 << 30
LIFETIME_S = 15.0
"""After which the process ends by itself, should nobody be left to end it."""


class TooLong(Exception):
    """A result that is longer than the request allows."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Does what a request asks.

    Args:
        request: "pattern", "flags", "string" and "task"; for "extract" also "mode" and "group",
            for "replace" also "replace", "count" and "most": how long the result may be.

    Returns:
        {"result": ...}, or {"fault": the input that is wrong, "reason": why}.
    """
    try:
        pattern = re.compile(request["pattern"], request["flags"])
    except (re.error, RecursionError, OverflowError) as error:
        return {"fault": "regex_pattern", "reason": str(error)}
    try:
        return {"result": TASKS[request["task"]](pattern, request)}
    except (re.error, IndexError) as error:
        return {"fault": "replace", "reason": str(error)}
    except TooLong as error:
        return {"fault": "length", "reason": str(error)}
    except MemoryError:
        return {"fault": "memory", "reason": f"more than {MEMORY_BYTES >> 30} GiB are needed"}


def _match(pattern: re.Pattern[str], request: dict[str, Any]) -> bool:
    return pattern.search(request["string"]) is not None


def _extract(pattern: re.Pattern[str], request: dict[str, Any]) -> str:
    mode = request["mode"]
    wanted = 1 if mode.startswith("First") else None
    # Of a pattern with groups, all matches are what the first group holds, as in re.findall.
    whole = min(1, pattern.groups) if mode == "All Matches" else 0
    group = request["group"] if mode.endswith(("Group", "Groups")) else whole
    if group > pattern.groups:
        return ""
    matches = itertools.islice(pattern.finditer(request["string"]), wanted)
    return "\n".join(match[group] or "" for match in matches)


def _replace(pattern: re.Pattern[str], request: dict[str, Any]) -> str:
    template, left = request["replace"], request.get("most", 0)
    if left <= 0:
        return pattern.sub(template, request["string"], count=request["count"])

    pattern.sub(template, "")  # refuses a wrong replacement also where nothing is found

    def expanded(match: re.Match[str]) -> str:
        nonlocal left
        made = match.expand(template)
        left -= len(made)
        if left < 0:
            raise TooLong(f"the result would have more than {request['most']:,} characters")
        return made

    return pattern.sub(expanded, request["string"], count=request["count"])


TASKS = {"match": _match, "extract": _extract, "replace": _replace}


def limit_memory() -> None:
    """Has this process fail, rather than the whole machine, when a pattern takes ever more."""
    try:
        import resource
    except ImportError:  # there is no such limit on Windows
        return
    with contextlib.suppress(ValueError, OSError):  # a lower limit holds already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


if __name__ == "__main__":
    faulthandler.dump_traceback_later(LIFETIME_S, exit=True)  # needs no interpreter lock
    limit_memory()
    sys.stdout.buffer.write(json.dumps(answer(json.load(sys.stdin.buffer))).encode())
