"""Strict JSON: what may leave the server, and how everything else is turned into it or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

JSON_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a boolean"),  # before numbers, which Python counts it among
    ((int, float), "a number"),
    (str, "a string"),
    (list, "a list"),
    (dict, "an object"),
)


class NotJsonError(TypeError):
    """A value that JSON cannot carry; the message says where it sits and what it is."""


def json_kind(value: Any) -> str:
    """What a value that came as JSON is, in JSON's words, with its article."""
    for kinds, name in JSON_KINDS:
        if isinstance(value, kinds):
            return name
    return "null"


def strict_json(value: Any) -> Any:
    """Returns value as plain JSON data: NaN and infinities become null, odd objects become text."""
    return _convert(value, "", lenient=True)


def require_json(value: Any, where: str) -> Any:
    """Returns value as plain JSON data.

    Tuples become lists; numbers of other libraries that offer ``item()`` become Python numbers.

    Raises:
        NotJsonError: naming the path below ``where`` that holds NaN, an infinity, or an object
            JSON has no form for.
    """
    return _convert(value, where, lenient=False)


def _convert(value: Any, where: str, lenient: bool) -> Any:
    """Plain data from `value`; the path `where` is only kept up where an error may name it."""
    if value is None or type(value) in (str, bool, int):
        return value
    if isinstance(value, float):
        return _finite(float(value), where, lenient)
    if isinstance(value, str):
        return str.__str__(value)  # what the text is, whatever a subclass (an enum) shows
    if isinstance(value, int):
        return int(value)
    if isinstance(value, (dict, Mapping)):  # dict first: asking an abstract class takes long
        return {
            str(key): _convert(item, where if lenient else f"{where}.{key}", lenient)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [
            _convert(item, where if lenient else f"{where}[{i}]", lenient)
            for i, item in enumerate(value)
        ]
    return _foreign(value, where, lenient)


def _finite(value: float, where: str, lenient: bool) -> float | None:
    if math.isfinite(value):
        return value
    if lenient:
        return None
    raise NotJsonError(
        f"{where} is {value!r}, which JSON cannot carry; return a finite number, text or null"
    )


def _foreign(value: Any, where: str, lenient: bool) -> Any:
    """Numbers of array libraries (``item()`` without arguments gives the Python number)."""
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return _convert(value.item(), where, lenient)
    if lenient:
        return str(value)
    raise NotJsonError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot "
        "carry; return numbers, text, lists and dicts"
    )


# made once: to make one costs more than to encode a small answer
_ENCODE = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_ENCODE_SORTED = json.JSONEncoder(allow_nan=False, separators=(",", ":"), sort_keys=True).encode


def dump_json(value: Any, *, sort_keys: bool = False) -> str:
    """Strict, compact JSON text of value; what JSON lacks is replaced as in strict_json."""
    encode = _ENCODE_SORTED if sort_keys else _ENCODE
    try:
        return encode(value)
    except (TypeError, ValueError):
        return encode(strict_json(value))
