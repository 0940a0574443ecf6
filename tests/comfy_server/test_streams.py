"""Numbered frames are kept for a while, within bounds, and gaps are noticed."""

from __future__ import annotations

import json

import pytest

from comfy_server.streams import KEPT_AFTER_CLOSE_S, KEPT_STREAMS, Stream, Streams


def test_frames_are_numbered_and_given_again_from_any_point() -> None:
    stream = Stream()
    for value in range(5):
        stream.number(json.dumps({"type": "x", "data": value}))
    missed = stream.missed_since(3)
    assert missed is not None
    assert [json.loads(frame.text) for frame in missed] == [
        {"type": "x", "data": 3, "seq": 4},
        {"type": "x", "data": 4, "seq": 5},
    ]
    assert stream.missed_since(5) == []
    assert stream.missed_since(6) is None


def test_a_stream_is_bounded_in_bytes_and_knows_what_it_lost() -> None:
    stream = Stream(kept_bytes=100)
    for _ in range(10):
        stream.number('{"a":"' + "x" * 30 + '"}')
    assert stream.missed_since(8) is not None
    assert stream.missed_since(0) is None
    stream.number('{"a":"' + "x" * 300 + '"}')
    assert stream.missed_since(10) is None
    assert stream.missed_since(11) == []


def test_streams_of_clients_long_gone_are_forgotten() -> None:
    now = [0.0]
    streams = Streams(lambda: now[0])
    streams.close(streams.open("gone"))
    now[0] = KEPT_AFTER_CLOSE_S + 1
    streams.open("here")
    assert "gone" not in streams
    assert "here" in streams


def test_many_closed_streams_make_room_for_new_ones() -> None:
    streams = Streams(lambda: 0.0)
    for number in range(KEPT_STREAMS + 50):
        streams.close(streams.open(str(number)))
    assert "0" not in streams
    assert str(KEPT_STREAMS + 49) in streams


def test_closed_streams_are_bounded_in_bytes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfy_server.streams.KEPT_BYTES_OF_CLOSED", 250)
    streams = Streams()
    for name in "abc":
        stream = streams.open(name)
        stream.number('{"x":"' + "y" * 80 + '"}')
        streams.close(stream)
    streams.open("d")
    assert [name for name in "abcd" if name in streams] == ["b", "c", "d"]
