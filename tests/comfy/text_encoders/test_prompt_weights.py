"""Prompt weights against the recorded parses."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comfy.text_encoders.prompt_weights import parse_parentheses, parse_prompt, token_weights


def test_every_recorded_prompt_parses_alike(golden_json) -> None:
    for text, expected in golden_json("prompt_weight_parse.json").items():
        assert [list(piece) for piece in parse_prompt(text)] == expected, text


@pytest.mark.parametrize(
    "text",
    [
        "(" * 50_000,
        "(" * 25_000 + "a" + ")" * 25_000,
        "(" * 25_000 + ":" + ")" * 25_000,
        "(:" * 20_000 + ")" * 17_000,
        "(a:1" * 15_000 + ")" * 12_000,
        "(a)" * 20_000,
        ")" * 50_000,
    ],
)
def test_hostile_texts_take_time_in_proportion(text: str) -> None:
    """Cutting out every level anew takes minutes."""
    begin = time.process_time()
    parse_prompt(text)
    assert time.process_time() - begin < 5.0


def recursive_weights(text: str, weight: float) -> list[tuple[str, float]]:
    """The rule as it is told: cut at the outermost parentheses, then again inside of each."""
    pieces: list[tuple[str, float]] = []
    for piece in parse_parentheses(text):
        if len(piece) < 2 or piece[0] != "(" or piece[-1] != ")":
            pieces.append((piece, weight))
            continue
        inner, _, number = piece[1:-1].rpartition(":")
        try:
            explicit = float(number) if inner else float("nan")
        except ValueError:
            explicit = float("nan")
        if abs(explicit) < float("inf"):
            pieces += recursive_weights(inner, explicit)
        else:
            pieces += recursive_weights(piece[1:-1], weight * 1.1)
    return pieces


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="(():a1.-", max_size=24))
def test_the_pieces_are_those_of_the_rule(text: str) -> None:
    assert token_weights(text, 1.0) == recursive_weights(text, 1.0)


def test_nesting_deeper_than_the_interpreter_recurses() -> None:
    depth = 5000
    [(piece, weight)] = token_weights("(" * depth + "a" + ")" * depth, 1.0)
    assert piece == "a"
    assert weight == pytest.approx(1.1**depth) or weight == float("inf")


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("(a:1.2:3)", [("a:1.2", 3.0)]),
        (":) (a:1.2)", [(":) (a:1.2)", 1.0)]),
        ("a) (b) ((c)) d", [("a) (b) (", 1.0), ("c", 1.1), (") d", 1.0)]),
        ("(a) :) ((b:1.3))", [("a", 1.1), (" :) (", 1.0), ("b", 1.3), (")", 1.0)]),
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
