"""What a second prompt runs again, under every cache policy."""

from __future__ import annotations

from typing import Any

import pytest

from comfy_execution.graph_utils import GraphBuilder, Node
from tests.blackbox.client import Client, fresh, graph
from tests.blackbox.conftest import House


def sum_of(a: int, b: int) -> tuple[GraphBuilder, list[Node]]:
    """a + b, shown; the graph and its nodes: a, b, sum, shown."""
    g = graph()
    first, second = g.node("TrialInt", value=a), g.node("TrialInt", value=b)
    added = g.node("TrialAdd", a=first.out(0), b=second.out(0))
    return g, [first, second, added, g.node("TrialShow", value=added.out(0))]


def test_an_unchanged_prompt_runs_nothing_where_results_are_kept(
    house: House, client: Client
) -> None:
    g, (*_, shown) = sum_of(fresh(), fresh())
    first, again = client.run(g), client.run(g)
    assert again.shown(shown) == first.shown(shown)
    if house.keeps:
        assert again.ran == []
        assert again.cached == set(g.nodes)
    else:
        assert sorted(again.ran) == sorted(g.nodes)
        assert again.cached == set()


def test_only_what_changed_and_what_follows_runs_again(house: House, client: Client) -> None:
    a = fresh()
    client.run(sum_of(a, fresh())[0])
    changed = fresh()
    g, (first, second, added, shown) = sum_of(a, changed)
    again = client.run(g)
    assert again.shown(shown) == [a + changed]
    assert (first.id in again.ran) is not house.keeps
    assert [node.id in again.ran for node in (second, added, shown)] == [True] * 3


def test_going_back_is_free_only_where_older_prompts_are_remembered(
    house: House, client: Client
) -> None:
    g, (*_, shown) = sum_of(fresh(), fresh())
    client.run(g)
    client.run(sum_of(fresh(), fresh())[0])
    again = client.run(g)
    assert again.succeeded
    assert (shown.id in again.ran) is (house.policy in ("classic", "none"))


def test_equal_nodes_of_another_prompt_share_the_result(house: House, client: Client) -> None:
    a, b = fresh(), fresh()
    client.run(sum_of(a, b)[0])
    g = graph()
    one = g.node("TrialInt", id="x", value=a)
    two = g.node("TrialInt", id="y", value=b)
    added = g.node("TrialAdd", id="z", a=one.out(0), b=two.out(0))
    total = g.node("TrialAdd", id="t", a=added.out(0), b=1)
    shown = g.node("TrialShow", id="s", value=total.out(0))
    again = client.run(g)
    assert again.shown(shown) == [a + b + 1]
    if house.keeps:
        assert again.ran == [total.id, shown.id]
        assert {one.id, two.id, added.id} <= again.cached


def test_equal_nodes_within_a_prompt_share_the_result_even_without_links(client: Client) -> None:
    g = graph()
    value = fresh()
    twins = [g.node("TrialInt", value=value) for _ in range(3)]
    shown = [g.node("TrialShow", value=twin.out(0)) for twin in twins]
    done = client.run(g)
    assert [done.shown(node) for node in shown] == [[value]] * 3


@pytest.mark.parametrize("with_client", [True, False])
def test_a_cached_output_is_in_the_history_and_shown(
    house: House, client: Client, with_client: bool
) -> None:
    g, (*_, shown) = sum_of(fresh(), fresh())
    before = client.run(g)
    if with_client:
        again = client.run(g)
        executed = [data for data in again.data("executed") if data["node"] == shown.id]
        assert executed[0]["output"] == {"value": before.shown(shown)}
        entry = again.entry
    else:
        entry = house.server.run(g.finalize())
    assert entry["outputs"] == before.entry["outputs"]
    assert entry["meta"][shown.id]["node_id"] == shown.id


def test_a_saved_file_that_vanished_is_made_again(house: House, client: Client) -> None:
    g = graph()
    picture = g.node("TrialPicture", shade="grey", width=16, height=16, count=1)
    saved = g.node("SaveImage", images=picture.out(0), filename_prefix=f"gone{fresh()}")
    place = client.run(g).shown(saved, "images")[0]
    if house.keeps:
        assert client.run(g).ran == []
    file = house.server.base / "results" / place["subfolder"] / place["filename"]
    file.unlink()
    again = client.run(g)
    assert saved.id in again.ran
    assert (picture.id in again.ran) is not house.keeps
    assert client.image(again.shown(saved, "images")[0])


def test_a_named_output_leaves_the_other_for_later(house: House, client: Client) -> None:
    g = graph()
    number = g.node("TrialInt", value=fresh())
    shown = [
        g.node("TrialShow", value=g.node("TrialAdd", a=number.out(0), b=n).out(0)) for n in (1, 2)
    ]
    client.run(g, partial_execution_targets=[shown[0].id])
    both = client.run(g)
    assert both.succeeded
    assert (number.id in both.ran) is not house.keeps
    assert (shown[0].id in both.ran) is not house.keeps
    assert shown[1].id in both.ran


STAMPS = ("TrialStamp", "TrialStampAll", "TrialStampStatic", "TrialStampAsync", "TrialSchemaStamp")


@pytest.mark.parametrize("kind", STAMPS)
@pytest.mark.parametrize("always", [True, False])
def test_a_node_that_reports_a_change_runs_again(
    house: House, client: Client, kind: str, always: bool
) -> None:
    g = graph()
    value = fresh()
    stamp = g.node(kind, value=value, always=always)
    shown = g.node("TrialShow", value=stamp.out(0))
    client.run(g)
    again = client.run(g)
    assert again.shown(shown) == [value]
    assert (stamp.id in again.ran) is (always or not house.keeps)
    assert (shown.id in again.ran) is (always or not house.keeps)


def test_a_check_for_changes_gets_constants_only(house: House, client: Client) -> None:
    g = graph()
    number = g.node("TrialInt", value=fresh())
    stamp = g.node("TrialStampConstants", value=number.out(0), always=False)
    g.node("TrialShow", value=stamp.out(0))
    assert client.run(g).succeeded
    assert (stamp.id in client.run(g).ran) is not house.keeps


def test_a_check_that_fails_means_always(client: Client) -> None:
    g = graph()
    stamp = g.node("TrialStampFailing", value=fresh(), always=False)
    g.node("TrialShow", value=stamp.out(0))
    for _ in range(2):
        done = client.run(g)
        assert done.succeeded
        assert stamp.id in done.ran


def test_a_node_that_shares_with_nobody_runs_for_each_id(house: House, client: Client) -> None:
    value = fresh()
    for node_id in ("a", "b"):
        g = graph()
        own = g.node("TrialOwn", id=node_id, value=value, always=False)
        g.node("TrialShow", id="shown", value=own.out(0))
        assert own.id in client.run(g).ran
        assert (own.id in client.run(g).ran) is not house.keeps


def test_whole_and_real_numbers_are_different_inputs(client: Client) -> None:
    seen: list[Any] = []
    for value in (1, 1.0, True, "1"):
        g = graph()
        shown = g.node("TrialShow", value=value)
        seen += client.run(g).shown(shown)
    assert [type(value) for value in seen] == [int, float, bool, str]


def test_a_failed_node_runs_again_and_its_sources_do_not(house: House, client: Client) -> None:
    g = graph()
    number = g.node("TrialAdd", a=fresh(), b=1)
    failing = g.node("TrialRaise", value=number.out(0), kind="ValueError")
    g.node("TrialShow", value=failing.out(0))
    assert client.run(g).error["node_id"] == failing.id
    again = client.run(g)
    assert failing.id in again.ran
    assert (number.id in again.ran) is not house.keeps


def test_freeing_memory_forgets_results(house: House, client: Client) -> None:
    g, (*_, shown) = sum_of(fresh(), fresh())
    client.run(g)
    assert house.server.post("/free", {"free_memory": True, "unload_models": True})[0] == 200
    assert shown.id in client.run(g).ran


def test_the_job_says_why_a_node_ran_again(house: House, client: Client) -> None:
    a = fresh()
    client.run(sum_of(a, fresh())[0])
    g, (_, second, added, _) = sum_of(a, fresh())
    job = house.server.get(f"/api/jobs/{client.run(g).prompt_id}")
    reasons = {node_id: record.get("reason", "") for node_id, record in job["nodes"].items()}
    assert "value" in reasons[second.id]
    assert "b" in reasons[added.id]
