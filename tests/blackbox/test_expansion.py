"""Nodes that put graphs in their place: recursion, loops, mixed returns, cycles."""

from __future__ import annotations

from typing import Any

import pytest

from comfy_execution.graph_utils import GraphBuilder, Node
from tests.blackbox.client import Client, fresh, graph
from tests.blackbox.conftest import House
from tests.support.prompts import DEMO_CHECKPOINT


def test_an_expanded_node_gives_the_result_of_its_graph(house: House, client: Client) -> None:
    g = graph()
    start = fresh()
    twice = g.node("TrialTwice", value=start, step=10)
    shown = g.node("TrialShow", value=twice.out(0))
    done = client.run(g)
    assert done.shown(shown) == [start + 20]
    inner = [name for name in done.ran if name.startswith(f"{twice.id}.")]
    assert len(inner) == 2
    states = done.data("progress_state")[-1]["nodes"]
    for name in inner:
        state = states[name]
        assert (state["parent_node_id"], state["real_node_id"]) == (twice.id, twice.id)
        assert state["display_node_id"] == twice.id
    executing = [data for data in done.data("executing") if data["node"] in inner]
    assert {data["display_node"] for data in executing} == {twice.id}
    again = client.run(g)
    assert (again.ran == []) is house.keeps


@pytest.mark.parametrize("prefix", ["a b[c-{'d': 1}].e/", "1.5.", "é" * 100, "x" * 300])
def test_ids_may_be_long_and_odd(client: Client, prefix: str) -> None:
    g = GraphBuilder(prefix=prefix)
    start = fresh()
    total = g.node("TrialSumTo", n=3, total=start)
    shown = g.node("TrialShow", value=g.node("TrialTwice", value=total.out(0), step=1).out(0))
    done = client.run(g)
    assert done.shown(shown) == [start + 8]
    for state in done.data("progress_state")[-1]["nodes"].values():
        assert state["real_node_id"] in g.nodes
        assert state["display_node_id"] in g.nodes


def test_a_node_may_expand_into_itself(client: Client) -> None:
    g = graph()
    total = fresh()
    shown = g.node("TrialShow", value=g.node("TrialSumTo", n=6, total=total).out(0))
    assert client.run(g).shown(shown) == [total + 21]


def test_over_a_list_some_calls_expand_and_some_do_not(client: Client) -> None:
    g = graph()
    mixed = g.node("TrialMixed", value=g.node("TrialRange", count=4).out(0))
    shown = [g.node("TrialShow", value=mixed.out(slot)) for slot in (0, 1)]
    done = client.run(g)
    assert done.shown(shown[0]) == [0, 10, 2, 30]
    assert done.shown(shown[1]) == ["plain", "graph", "plain", "graph"]


def test_a_list_may_come_out_of_a_graph(client: Client) -> None:
    g = graph()
    numbers = g.node("TrialListOfTwo", count=3)
    shown = g.node("TrialShow", value=g.node("TrialAdd", a=numbers.out(0), b=5).out(0))
    assert client.run(g).shown(shown) == [5, 6, 7]


def test_an_empty_graph_is_a_plain_return(client: Client) -> None:
    g = graph()
    shown = g.node("TrialShow", value=g.node("TrialEmpty", value=4).out(0))
    assert client.run(g).shown(shown) == [5]


def test_an_output_node_inside_is_run_and_shown_again_from_the_cache(client: Client) -> None:
    g = graph()
    value = fresh()
    inside = g.node("TrialShowInside", value=value)
    g.node("TrialShow", value=inside.out(0))
    for _ in range(2):
        done = client.run(g)
        shown = {name: done.shown(name) for name in done.entry["outputs"]}
        assert list(shown.values()) == [[2 * value]] * 2
        name = next(name for name in shown if name.startswith(f"{inside.id}."))
        meta = done.entry["meta"][name]
        assert (meta["display_node"], meta["parent_node"]) == (inside.id, inside.id)


def test_schema_nodes_expand(client: Client) -> None:
    g = graph()
    shown = g.node("TrialSchemaShow", value=g.node("TrialSchemaTwice", value=21).out(0))
    assert client.run(g).shown(shown, "text") == ["42"]


# Failures inside


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("TrialCircle", "cycle"),
        ("TrialSelfWaiting", "cycle"),
        ("TrialUnheard", "NoSuchClass"),
        ("TrialTaken", "exists already"),
        ("TrialFailInside", "bad value"),
    ],
)
def test_a_failure_inside_is_blamed_on_the_posted_node(
    client: Client, kind: str, text: str
) -> None:
    g = graph()
    node = g.node(kind, value=fresh())
    g.node("TrialShow", value=node.out(0))
    done = client.run(g)
    assert not done.succeeded
    assert done.error["node_id"] == node.id
    assert done.error["node_type"] == kind
    assert text in done.error["exception_message"]
    after = graph()
    shown = after.node("TrialShow", value=fresh())
    assert client.run(after).shown(shown)


# Loops


def while_loop(start: int, limit: int, step: int) -> tuple[GraphBuilder, Node]:
    """start + step + step ... until it is not less than limit."""
    g = graph()
    opening = g.node("TrialWhileOpen", id="open", value0=start)
    added = g.node("TrialAdd", id="added", a=opening.out(1), b=step)
    less = g.node("TrialLess", id="less", a=added.out(0), b=limit)
    closing = g.node(
        "TrialWhileClose", id="close", flow=opening.out(0), go_on=less.out(0), value0=added.out(0)
    )
    return g, g.node("TrialShow", id="shown", value=closing.out(0))


def test_a_while_loop(client: Client) -> None:
    start = fresh()
    g, shown = while_loop(start, start + 10, 3)
    assert client.run(g).shown(shown) == [start + 12]


def for_loop(count: Any, start: Any, body: str = "TrialAdd", **inputs: Any) -> GraphBuilder:
    """`start`, and for each turn the turns that are left added to it; node "shown" shows it."""
    g = graph()
    opening = g.node("TrialForOpen", id="open", count=count, value1=start)
    added = g.node(body, id="body", a=opening.out(2), b=opening.out(1), **inputs)
    closing = g.node("TrialForClose", id="close", flow=opening.out(0), value1=added.out(0))
    g.node("TrialShow", id="shown", value=closing.out(0))
    return g


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_for_loop(client: Client, count: int) -> None:
    start = fresh()
    done = client.run(for_loop(count, start))
    assert done.shown("shown") == [start + count * (count + 1) // 2]


def test_the_length_of_a_loop_may_be_computed(client: Client) -> None:
    start = fresh()
    g = for_loop(1, start)
    opening = g.lookup_node("open")
    opening.set_input("count", g.node("TrialAdd", a=1, b=2).out(0))
    assert client.run(g).shown("shown") == [start + 6]


def test_a_finished_loop_is_kept_as_a_whole(house: House, client: Client) -> None:
    g = for_loop(4, fresh())
    client.run(g)
    again = client.run(g)
    assert again.succeeded
    assert (again.ran == []) is house.keeps


def test_one_more_turn_repeats_none_of_the_others(house: House, client: Client) -> None:
    start = fresh()
    turns = []
    for limit in (start + 20, start + 30):
        g, shown = while_loop(start, limit, 10)
        done = client.run(g)
        assert done.shown(shown) == [limit]
        turns.append([name for name in done.ran if name.endswith("added")])
    if house.policy == "classic":
        assert len(turns[1]) == 1
    if house.policy == "none":
        assert len(turns[1]) == 3


def test_a_loop_collects_what_its_turns_give(client: Client) -> None:
    g = graph()
    opening = g.node("TrialForOpen", id="open", count=4)
    collected = g.node("TrialCollect", id="body", item=opening.out(1), before=opening.out(2))
    closing = g.node("TrialForClose", id="close", flow=opening.out(0), value1=collected.out(0))
    items = g.node("TrialUnpack", collection=closing.out(0))
    shown = g.node("TrialShow", value=items.out(0))
    assert client.run(g).shown(shown) == [4, 3, 2, 1]


def test_loops_may_be_nested(client: Client) -> None:
    g = graph()
    start = fresh()
    outer = g.node("TrialForOpen", id="outer", count=2, value1=start)
    inner = g.node("TrialForOpen", id="inner", count=3, value1=outer.out(2))
    added = g.node("TrialAdd", id="body", a=inner.out(2), b=inner.out(1))
    inner_end = g.node("TrialForClose", id="inner-end", flow=inner.out(0), value1=added.out(0))
    outer_end = g.node("TrialForClose", id="outer-end", flow=outer.out(0), value1=inner_end.out(0))
    shown = g.node("TrialShow", value=outer_end.out(0))
    assert client.run(g).shown(shown) == [start + 2 * (3 + 2 + 1)]


def test_a_change_in_a_loop_runs_the_loop_again(client: Client) -> None:
    g = for_loop(2, fresh())
    stamp = g.node("TrialStamp", value=5, always=True)
    g.lookup_node("body").set_input("b", stamp.out(0))
    for _ in range(2):
        done = client.run(g)
        assert done.succeeded
        assert stamp.id in done.ran
        assert any(name.endswith("body") for name in done.ran)


def test_a_value_from_outside_is_made_once_for_all_turns(client: Client) -> None:
    g = for_loop(3, fresh())
    outside = g.node("TrialStamp", value=7, always=True)
    g.lookup_node("body").set_input("b", outside.out(0))
    done = client.run(g)
    assert done.succeeded
    assert done.ran.count(outside.id) == 1


def test_a_failing_turn_names_the_posted_node(client: Client) -> None:
    g = graph()
    opening = g.node("TrialForOpen", id="open", count=3, value1=fresh())
    failing = g.node("TrialRaise", id="body", value=opening.out(2), kind="ValueError")
    closing = g.node("TrialForClose", id="close", flow=opening.out(0), value1=failing.out(0))
    g.node("TrialShow", value=closing.out(0))
    assert client.run(g).error["node_id"] == "body"


def test_sampling_in_an_expansion(client: Client) -> None:
    g = graph()
    loaded = g.node("CheckpointLoaderSimple", ckpt_name=DEMO_CHECKPOINT)
    texts = [g.node("CLIPTextEncode", text=t, clip=loaded.out(1)) for t in ("a red circle", "")]
    latent = g.node("EmptyLatentImage", width=64, height=64, batch_size=1)
    sampled = g.node(
        "TrialSampleInside", model=loaded.out(0), positive=texts[0].out(0), rounds=2,
        negative=texts[1].out(0), latent=latent.out(0),
    )  # fmt: skip
    decoded = g.node("VAEDecode", samples=sampled.out(0), vae=loaded.out(2))
    shown = g.node("TrialShow", value=decoded.out(0))
    done = client.run(g)
    assert done.shown(shown)[0]["shape"] == [1, 64, 64, 3]
    progress = done.data("progress")
    assert {step["max"] for step in progress} == {2}
    assert {step["node"].split(".")[0] for step in progress} == {sampled.id}
