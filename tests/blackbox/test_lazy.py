"""Lazy inputs: what is not needed is not made."""

from __future__ import annotations

from typing import Any

import pytest

from comfy_execution.graph_utils import GraphBuilder, Node
from tests.blackbox.client import Client, fresh, graph

SIZE = {"width": 16, "height": 16, "count": 1}


def blended(level: float) -> tuple[GraphBuilder, list[Node], Node]:
    """Black and white under a mask of one level; the graph, both pictures, the node that shows."""
    g = graph()
    pictures = [
        g.node("TrialPicture", shade=shade, tag=fresh(), **SIZE) for shade in ("black", "white")
    ]
    mask = g.node("TrialMask", level=level, **SIZE)
    first, second = (picture.out(0) for picture in pictures)
    blend = g.node("TrialBlend", first=first, second=second, mask=mask.out(0))
    return g, pictures, g.node("TrialShow", value=blend.out(0))


@pytest.mark.parametrize(
    ("level", "needed"), [(0.0, [True, False]), (0.25, [True, True]), (1.0, [False, True])]
)
def test_only_the_pictures_under_the_mask_are_made(
    client: Client, level: float, needed: list[bool]
) -> None:
    g, pictures, shown = blended(level)
    done = client.run(g)
    assert done.shown(shown)[0]["mean"] == level
    assert [picture.id in done.ran for picture in pictures] == needed


def test_a_lazy_node_that_waited_is_announced_again(client: Client) -> None:
    g = graph()
    condition = g.node("TrialLess", a=0, b=fresh())
    value = g.node("TrialStamp", value=4, always=True)
    either = g.node("TrialEither", condition=condition.out(0), if_true=value.out(0), if_false=0)
    shown = g.node("TrialShow", value=either.out(0))
    done = client.run(g)
    assert done.shown(shown) == [4]
    assert done.ran == [condition.id, either.id, value.id, either.id, shown.id]


def test_a_node_may_ask_for_one_input_after_the_other(client: Client) -> None:
    g = graph()
    values = {"a": -fresh(), "b": fresh(), "c": fresh()}
    numbers = {name: g.node("TrialInt", value=value) for name, value in values.items()}
    found = g.node("TrialFirstPositive", **{name: node.out(0) for name, node in numbers.items()})
    shown = g.node("TrialShow", value=found.out(0))
    done = client.run(g)
    assert done.shown(shown) == [values["b"]]
    assert numbers["c"].id not in done.ran


def test_lazy_inputs_that_are_not_linked_are_no_reason_to_wait(client: Client) -> None:
    g = graph()
    shown = g.node("TrialShow", value=g.node("TrialFirstPositive", a=-5, b=6).out(0))
    assert client.run(g).shown(shown) == [6]


def test_a_list_of_masks_asks_for_all_that_any_of_them_needs(client: Client) -> None:
    g = graph()
    masks = [g.node("TrialMask", level=level, **SIZE) for level in (0.0, 1.0)]
    head = g.node("TrialCollect", item=masks[0].out(0))
    both = g.node("TrialCollect", item=masks[1].out(0), before=head.out(0))
    several = g.node("TrialUnpack", collection=both.out(0))
    pictures = [g.node("TrialPicture", shade=shade, **SIZE) for shade in ("grey", "white")]
    first, second = (picture.out(0) for picture in pictures)
    blend = g.node("TrialBlend", first=first, second=second, mask=several.out(0))
    shown = g.node("TrialShow", value=blend.out(0))
    done = client.run(g)
    assert [item["mean"] for item in done.shown(shown)] == [0.5, 1.0]


@pytest.mark.parametrize("which", [True, False])
def test_a_lazy_branch_that_would_fail_is_left_alone(client: Client, which: bool) -> None:
    g = graph()
    bad = g.node("TrialRaise", value=1, kind="ValueError")
    good = g.node("TrialInt", value=7)
    links = {"if_true": good, "if_false": bad} if which else {"if_true": bad, "if_false": good}
    sources = {name: node.out(0) for name, node in links.items()}
    either = g.node("TrialEither", condition=which, **sources)
    shown = g.node("TrialShow", value=either.out(0))
    assert client.run(g).shown(shown) == [7]


def test_conditions_may_be_nested(client: Client) -> None:
    g = graph()
    values = [g.node("TrialInt", value=fresh()) for _ in range(4)]
    yes, no = (g.node("TrialLess", a=a, b=1).out(0) for a in (0, 1))

    def either(condition: list[Any], if_true: Node, if_false: Node) -> Node:
        sources = {"if_true": if_true.out(0), "if_false": if_false.out(0)}
        return g.node("TrialEither", condition=condition, **sources)

    outer = either(yes, either(no, values[0], values[1]), either(no, values[2], values[3]))
    shown = g.node("TrialShow", value=outer.out(0))
    done = client.run(g)
    assert done.shown(shown) == [values[1].get_input("value")]
    assert [value.id in done.ran for value in values] == [False, True, False, False]


def test_asking_for_what_is_not_there_is_an_error_of_the_node(client: Client) -> None:
    g = graph()
    greedy = g.node("TrialWantsTooMuch", a=g.node("TrialInt", value=1).out(0))
    g.node("TrialShow", value=greedy.out(0))
    error = client.run(g).error
    assert error["node_id"] == greedy.id
    assert "no_such_input" in error["exception_message"]
