"""JSON at the edge: what leaves is strict, what enters is bounded before it is built.

A body is measured on its bytes (depth, number of values) before it is parsed, so that a bomb costs
a scan and no memory. Numbers JSON does not know become null, numbers out of a float's range are
refused, and unpaired surrogates are refused because no file or database could store them. Large
bodies are read in a thread, and large answers written in pieces: others are served meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, NoReturn

from aiohttp import web

from comfy_execution.turns import Turns
from comfy_execution.wire import dump_json, json_kind

MAX_DEPTH = 200
MAX_VALUES = 750_000

FEW_VALUES = 1000  # bodies with no more are not worth a look at their parts
MANY_DIGITS = b"0" * 200  # with a short exponent still no overflow
PIECE_BYTES = 256 * 1024  # longer bodies are read in a thread, which gives way after each piece

_ALL_BUT_BRACKETS = bytes(code for code in range(256) if code not in b"[]{}")
_STEPS = [1 if code in b"[{" else -1 if code in b"]}" else 0 for code in range(256)]
_DIGITS_ALIKE = bytes(ord("0") if code in b"0123456789" else code for code in range(256))
_EXPONENT = re.compile(rb"[eE][+]?[0-9]{2}")
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F]")


class BadJson(ValueError):
    """A body that is not acceptable JSON; the text says what is wrong and how to mend it."""


def dumps(value: Any) -> str:
    """Compact, ASCII-only, strict JSON: NaN and infinities become null, odd objects text."""
    return dump_json(value)


def json_response(
    value: Any, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """An `application/json` answer with a strict body."""
    return web.Response(
        text=dumps(value), status=status, headers=headers, content_type="application/json"
    )


async def large_response(
    name: str, rows: Mapping[str, Any], others: Mapping[str, Any], status: int = 200
) -> web.Response:
    """As `json_response` of `{**others, name: rows}`, for an object of very many rows."""
    turns, texts = Turns(), []
    for key, value in rows.items():
        texts.append(f"{dumps(key)}:{dumps(value)}")
        if turns.due:
            await turns.give()
    opening = dumps({**others, name: {}})[:-2]
    text = f"{opening}{','.join(texts)}}}}}"
    return web.Response(text=text, status=status, content_type="application/json")


def error_response(
    status: int, message: str, headers: dict[str, str] | None = None, **extra: Any
) -> web.Response:
    """A `{"error": message, ...}` answer."""
    return json_response({"error": message, **extra}, status, headers)


def _measure(body: bytes) -> bytes:
    """Refuses a body that is nested too deeply or holds too many values.

    Returns:
        What may hold its numbers: the body, or of a long one what stands outside of texts.
    Raises:
        BadJson: saying how much is too much.
    """
    opened = body.count(b"[") + body.count(b"{")
    is_short = len(body) <= PIECE_BYTES
    if is_short and opened <= MAX_DEPTH and body.count(b",") <= FEW_VALUES:
        return body
    bare = _without_strings(body)
    values = bare.count(b",") + bare.count(b"[") + bare.count(b"{")
    if values > MAX_VALUES:
        raise BadJson(f"the body holds {values} JSON values; at most {MAX_VALUES} are accepted")
    depth = 0
    for piece in _pieces(bare.translate(None, _ALL_BUT_BRACKETS)):
        depths = list(accumulate(map(_STEPS.__getitem__, piece), initial=depth))
        if max(depths) > MAX_DEPTH:
            raise BadJson(f"the body is nested more than {MAX_DEPTH} levels deep")
        depth = depths[-1]
    return bare


def _pieces(content: bytes, overlap: int = 0) -> Iterator[bytes]:
    """A body in pieces that share a few bytes, so that a thread that looks at it gives way."""
    for start in range(0, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES + overlap]


def _holds(pattern: re.Pattern[bytes], content: bytes, longest: int) -> bool:
    return any(pattern.search(piece) for piece in _pieces(content, longest))


def _without_strings(body: bytes) -> bytes:
    """What stands outside of texts; where the JSON is broken, something else from there on."""
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(unescaped.split(b'"')[::2])


def _has_huge_numbers(bare: bytes) -> bool:
    """Whether a number may be too large for a float; a text may look like one."""
    return _holds(_EXPONENT, bare, 4) or any(
        MANY_DIGITS in piece.translate(_DIGITS_ALIKE) for piece in _pieces(bare, len(MANY_DIGITS))
    )


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadJson(f"the number {text[:40]} is out of range")
    return value


_TRUSTING = json.JSONDecoder(parse_constant=lambda _: None)
_CHECKING = json.JSONDecoder(parse_float=_finite, parse_constant=lambda _: None)


def _refuse_long_integer(error: ValueError) -> NoReturn:
    raise BadJson(f"not acceptable JSON: {error}") from error


def loads(body: bytes) -> Any:
    """Parses a request body.

    Raises:
        BadJson: not UTF-8, not JSON, too deep, too many values, a number out of range.
    """
    decoder = _CHECKING if _has_huge_numbers(_measure(body)) else _TRUSTING
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadJson(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        value = decoder.decode(text)
    except json.JSONDecodeError as error:
        found = "an empty body" if not text.strip() else f"{error.msg} at line {error.lineno}"
        raise BadJson(f"the body is not JSON: {found}") from error
    except BadJson:
        raise
    except RecursionError as error:
        raise BadJson(f"the body is nested more than {MAX_DEPTH} levels deep") from error
    except ValueError as error:  # an integer with more digits than Python converts
        _refuse_long_integer(error)
    if _holds(_SURROGATE, body, 4) and _has_unpaired_surrogates(body):
        raise BadJson(
            "the body holds half of a surrogate pair (\\ud800 to \\udfff); send whole characters"
        )
    return value


def _has_unpaired_surrogates(body: bytes) -> bool:
    """Whether a text of valid JSON has an escape that is half a character."""
    escapes = body.replace(b"\\\\", b"  ")  # what follows two backslashes is no escape
    return len(_SURROGATE.findall(escapes)) != 2 * len(_PAIR.findall(escapes))


async def read_json(request: web.Request) -> Any:
    """The request's body as JSON, whatever its content type says; raises BadJson."""
    body = await request.read()
    return loads(body) if len(body) <= PIECE_BYTES else await asyncio.to_thread(loads, body)


async def read_object(request: web.Request) -> dict[str, Any]:
    """As `read_json`, for routes that want a JSON object."""
    value = await read_json(request)
    if not isinstance(value, dict):
        raise BadJson(f"the body must be a JSON object, found {json_kind(value)}")
    return value
