"""Prompt weights against the recorded parses."""

from __future__ import annotations

import pytest

from comfy.text_encoders.prompt_weights import parse_prompt, token_weights


def test_every_recorded_prompt_parses_alike(golden_json) -> None:
    for text, expected in golden_json("prompt_weight_parse.json").items():
        assert [list(piece) for piece in parse_prompt(text)] == expected, text


def test_nesting_deeper_than_the_interpreter_recurses() -> None:
    depth = 5000
    [(piece, weight)] = token_weights("(" * depth + "a" + ")" * depth, 1.0)
    assert piece == "a"
    assert weight == pytest.approx(1.1**depth) or weight == float("inf")
