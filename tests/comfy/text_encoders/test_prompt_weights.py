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


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("(a:1.2:3)", [("a:1.2", 3.0)]),
        ("(a:b)", [("a:b", 1.1)]),
        ("((a:2):3)", [("a", 2.0)]),
        ("((a):2)", [("a", 2.2)]),
        ("(a:-1)", [("a", -1.0)]),
        ("(:2)", [(":2", 1.1)]),
        ("(a:nan)", [("a:nan", 1.1)]),
        ("(a:inf)", [("a:inf", 1.1)]),
        ("(a:1e999)", [("a:1e999", 1.1)]),
        ("a)b", [("a)b", 1.0)]),
        ("(a", [("(a", 1.0)]),
        ("a (b (c)", [("a ", 1.0), ("b ", 1.1), ("(c", 1.1)]),  # what users' prompts get today
        ("(a))", [("a", 1.1), (")", 1.0)]),
        (r"\(a:2\)", [("(a:2)", 1.0)]),
        (r"(a\):1.5)", [("a)", 1.5)]),
        ("()", []),
        ("", []),
    ],
)
def test_odd_prompts(text: str, pieces: list[tuple[str, float]]) -> None:
    made = parse_prompt(text)
    assert [piece for piece, _ in made] == [piece for piece, _ in pieces]
    assert [weight for _, weight in made] == pytest.approx([weight for _, weight in pieces])


def test_nesting_has_no_limit() -> None:
    deep = 5000
    ((piece, weight),) = parse_prompt("(" * deep + "a:2" + ")" * deep)
    assert (piece, weight) == ("a", 2.0)
