"""JSON at the edge: strict on the way out, bounded on the way in."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from comfy_server.strict_json import MAX_DEPTH, MAX_VALUES, PIECE_BYTES, BadJson, dumps, loads

Client = TestClient[Any, Any]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": float("nan")}, '{"a":null}'),
        ([float("inf"), -0.5], "[null,-0.5]"),
        ({"a": {1, 2}}, '{"a":"{1, 2}"}'),
        ({1: (2, 3)}, '{"1":[2,3]}'),
        ("grün\u2028", '"gr\\u00fcn\\u2028"'),
        ({"a": b"x"}, '{"a":"b\'x\'"}'),
    ],
)
def test_what_leaves_is_strict(value: Any, text: str) -> None:
    assert dumps(value) == text
    json.loads(dumps(value), parse_constant=pytest.fail)


def test_what_enters_is_plain_json() -> None:
    assert loads(b'\xef\xbb\xbf{"a": [NaN, Infinity, 1.5, "\\ud83d\\ude00"]}') == {
        "a": [None, None, 1.5, "😀"],
    }


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [
        (r"\ud83d\ude00", True),
        (r"\uD83D\uDE00 \ud83d\ude01", True),
        (r"\\ud83d", True),
        (r"\\\ud83d\ude00", True),
        (r"\ud83d\\\ude00", False),
        (r"\\\ud83d", False),
        (r"\ude00\ud83d", False),
        (r"\ud83d\ud83d\ude00", False),
        (r"\ud83d \ude00", False),
        (r"\ud83d\u0041", False),
        (r"\udc00", False),
    ],
)
@pytest.mark.parametrize("padding", ["", "[" * 150 + "]" * 150])
def test_only_whole_characters_are_accepted(text: str, is_whole: bool, padding: str) -> None:
    body = f'{{"a": "{padding}{text}", "b": [{",".join("[0.5]" for _ in range(300))}]}}'.encode()
    if is_whole:
        assert loads(body) == json.loads(body)
        return
    with pytest.raises(BadJson, match="surrogate"):
        loads(body)


@pytest.mark.parametrize(
    "number", ["1e400", "-1E+0999", "9" * 330 + ".5", "9" * 301 + "e9", "9" * 305 + "E6", "12e308"]
)
@pytest.mark.parametrize("values", [1, 5000])
def test_numbers_out_of_range_are_refused_wherever_they_stand(number: str, values: int) -> None:
    many = ",".join(["[1.25]"] * values)
    with pytest.raises(BadJson, match="out of range"):
        loads(f'{{"a": [{many}, {number}], "c": "x"}}'.encode())


def test_large_numbers_and_texts_like_numbers_are_accepted() -> None:
    body = b'{"a": 1e300, "b": "9e99999", "c": [' + b"[2.5]," * 300 + b'"1e999"]}'
    assert loads(body) == json.loads(body)


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.mark.parametrize(
    "bomb",
    [
        nested(100_000),
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b"[" * 1_000_000,
        b"[" + b"0," * (MAX_VALUES + 5) + b"0]",
        b"{" + b'"key":1,' * 1_000_000 + b'"k":1}',
        b"[" + b"[]," * 400_000 + b"[]]",
        b'"' + b"\\" * 1_000_001,
        b'"\xed\xa0\x80"',
        b'{"a": "' + b"x" * 100 + b'\\ud800"}',
        b"1" * 1_000_000,
        b"-1e400",
    ],
    ids=range(11),
)
def test_bombs_are_refused_in_no_time(bomb: bytes) -> None:
    started = time.process_time()
    with pytest.raises(BadJson):
        loads(bomb)
    assert time.process_time() - started < 1.5


def test_long_texts_full_of_brackets_and_commas_are_no_bombs() -> None:
    text = '[{,\\"' * 400_000
    assert loads(json.dumps({"a": text}).encode()) == {"a": text}
    assert loads(nested(MAX_DEPTH)) is not None


@pytest.mark.parametrize(
    "tail", [b"-1e400", b"[" * 201 + b"]" * 201, b'"\\ud800"', b"9" * 400 + b".5"], ids=range(4)
)
@pytest.mark.parametrize("shift", range(-4, 5))
def test_what_is_refused_is_found_behind_any_piece(tail: bytes, shift: int) -> None:
    head = b"[" + b" " * (2 * PIECE_BYTES + shift - 3)
    with pytest.raises(BadJson):
        loads(head + tail + b"]")
    assert loads(head + b'"[1e400"]') == ["[1e400"]


@pytest.mark.parametrize("path", ["/prompt", "/settings", "/queue", "/api/jobs/cancel", "/history"])
async def test_every_route_refuses_bombs(client: Client, path: str) -> None:
    for bomb in (nested(10_000), b"[" + b"0," * 800_000 + b"0]"):
        answer = await client.post(path, data=bomb)
        assert answer.status == 400
        assert "error" in await answer.json()
