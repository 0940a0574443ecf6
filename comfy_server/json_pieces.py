"""Reading large JSON value by value, so that a thread that does it gives way to others.

The parser of the standard library holds the interpreter until it is done: 130 ms for a prompt of
45,000 nodes, in which nobody is served. Here the outer levels are walked in Python, which the
interpreter may leave at any step, and only what lies inside is left to that parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.decoder import scanstring  # type: ignore[attr-defined]  # not in the stubs
from typing import Any

LEVELS = 6
"""Of objects and lists that are walked; `extra_data.extra_pnginfo.workflow.nodes` is the fifth."""

LEVELS_OF_PROMPT = 2
"""Below the body and its member "prompt" come nodes, each of them small."""

_SPACE = re.compile(r"[ \t\n\r]*")
Scan = Callable[[str, int], tuple[Any, int]]


def decode(decoder: json.JSONDecoder, text: str) -> Any:
    """The value of a JSON text, as `decoder.decode` gives it.

    Raises:
        JSONDecodeError: The text is not JSON.
    """
    scan: Scan = decoder.scan_once  # type: ignore[attr-defined]  # not in the stubs
    value, end = _value(scan, text, _past_space(text, 0), LEVELS, 0)
    end = _past_space(text, end)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _value(scan: Scan, text: str, at: int, levels: int, depth: int) -> tuple[Any, int]:
    """The value that begins at a place, and where it ends."""
    opening = text[at : at + 1]
    if depth < levels and opening == "{":
        return _object(scan, text, at + 1, levels, depth)
    if depth < levels and opening == "[":
        return _list(scan, text, at + 1, levels, depth)
    try:
        return scan(text, at)
    except StopIteration as error:
        raise json.JSONDecodeError("Expecting value", text, error.value) from None


def _object(scan: Scan, text: str, at: int, levels: int, depth: int) -> tuple[dict[str, Any], int]:
    members: dict[str, Any] = {}
    at = _past_space(text, at)
    if text[at : at + 1] == "}":
        return members, at + 1
    while True:
        if text[at : at + 1] != '"':
            message = "Expecting property name enclosed in double quotes"
            raise json.JSONDecodeError(message, text, at)
        name, at = scanstring(text, at + 1, True)
        at = _past_space(text, at)
        if text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
        is_prompt = depth == 0 and name == "prompt"
        below = LEVELS_OF_PROMPT if is_prompt else levels
        members[name], at = _value(scan, text, _past_space(text, at + 1), below, depth + 1)
        at, is_last = _next(text, at, "}")
        if is_last:
            return members, at


def _list(scan: Scan, text: str, at: int, levels: int, depth: int) -> tuple[list[Any], int]:
    items: list[Any] = []
    at = _past_space(text, at)
    if text[at : at + 1] == "]":
        return items, at + 1
    while True:
        item, at = _value(scan, text, at, levels, depth + 1)
        items.append(item)
        at, is_last = _next(text, at, "]")
        if is_last:
            return items, at


def _next(text: str, at: int, closing: str) -> tuple[int, bool]:
    """Where the next member begins, or where the container ends."""
    at = _past_space(text, at)
    found = text[at : at + 1]
    if found == closing:
        return at + 1, True
    if found != ",":
        raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
    return _past_space(text, at + 1), False
