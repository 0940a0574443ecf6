"""Texts that nodes make are bounded: one by one, and all of a prompt together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from comfy_execution import text_limit
from comfy_extras import nodes_string
from tests.comfy_execution.support import Bench, make, node, spec_free

LIMIT = 1000


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    text_limit.install_text_limit(LIMIT)
    yield
    text_limit.install_text_limit(text_limit.DEFAULT_CHARACTERS)


Letters = node("Letters", RETURN_TYPES=("STRING",), run=lambda self: ("x" * 100,))
Double = node(
    "Double",
    spec_free("text"),
    RETURN_TYPES=("STRING",),
    run=lambda self, text: (text + text,),
)
Words = node("Words", RETURN_TYPES=("LIST",), run=lambda self: (["x" * 600, ["x" * 1001]],))
Many = node(
    "Many",
    spec_free("text", "which"),
    RETURN_TYPES=("STRING",),
    OUTPUT_IS_LIST=(True,),
    run=lambda self, text, which: ([text + str(place) for place in range(10)],),
)

Expands = node(
    "Expands",
    spec_free("text"),
    RETURN_TYPES=("STRING", "STRING"),
    run=lambda self, text: {
        "result": (["letters", 0], text * 11),
        "expand": {"letters": make("Letters")},
    },
)


@pytest.fixture
def bench() -> Bench:
    return Bench(classes={kind.__name__: kind for kind in (Letters, Double, Words, Many, Expands)})


def chain(count: int) -> dict[str, Any]:
    prompt = {"0": make("Letters")}
    for place in range(count):
        prompt[str(place + 1)] = make("Double", text=[str(place), 0])
    return prompt | {"show": make("Show", value=[str(count), 0])}


def test_a_chain_that_doubles_a_text_ends_with_words(bench: Bench) -> None:
    bench.run(chain(30))
    (failure,) = bench.sink.named("execution_error")
    assert failure["node_id"] == "4"
    assert "1,600 characters" in failure["exception_message"]
    assert "--max-text-size" in failure["exception_message"]


def test_texts_below_the_limit_pass(bench: Bench) -> None:
    bench.run(chain(3))
    assert bench.sink.named("execution_error") == []


def test_texts_that_a_node_gives_beside_a_graph_count(bench: Bench) -> None:
    bench.run(
        {**chain(0), "1": make("Expands", text=["0", 0]), "show": make("Show", value=["1", 1])}
    )
    (failure,) = bench.sink.named("execution_error")
    assert failure["node_id"] == "1"
    assert "1,100 characters" in failure["exception_message"]


def test_no_limit_bounds_nothing(bench: Bench) -> None:
    text_limit.install_text_limit(0)
    bench.run(chain(8))
    assert bench.sink.named("execution_error") == []


def test_texts_in_lists_count(bench: Bench) -> None:
    bench.run({"1": make("Words"), "2": make("Show", value=["1", 0])})
    (failure,) = bench.sink.named("execution_error")
    assert "1,001 characters" in failure["exception_message"]


def test_all_texts_of_a_prompt_are_bounded_together_and_the_next_prompt_begins_anew(
    bench: Bench,
) -> None:
    prompt: dict[str, Any] = {"0": make("Letters")}
    prompt |= {f"m{place}": make("Many", text=["0", 0], which=place) for place in range(9)}
    prompt |= {f"s{place}": make("Show", value=[f"m{place}", 0]) for place in range(9)}
    bench.run(prompt)
    (failure,) = bench.sink.named("execution_error")
    assert "the nodes of this prompt have made" in failure["exception_message"]
    bench.run({"a": make("Letters"), "b": make("Show", value=["a", 0])})
    assert bench.sink.named("execution_error") == []


def test_a_replacement_is_refused_before_it_is_made() -> None:
    text_limit.install_text_limit(10**9)
    with pytest.raises(text_limit.TextTooLongError, match="1,000,000,000,000"):
        nodes_string.StringReplace.execute("a" * 10**6, "a", "b" * 10**6)


@pytest.mark.parametrize("pattern", ["a", "(a)+?|b"])
def test_a_replacement_by_a_pattern_is_refused_before_it_is_made(pattern: str) -> None:
    with pytest.raises(ValueError, match="characters"):
        nodes_string.RegexReplace.execute("a" * 900, pattern, r"\g<0>\g<0>")
    assert len(nodes_string.RegexReplace.execute("a" * 400, pattern, r"\g<0>\g<0>")[0]) == 800
