"""Coroutine functions: naps that overlap, errors, laziness, expansion, time limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.blackbox.client import Client, fresh, graph

NAP_S = 0.25


def test_an_async_node_gives_its_value(client: Client) -> None:
    g = graph()
    value = fresh()
    shown = g.node("TrialShow", value=g.node("TrialNap", value=value, seconds=0.01).out(0))
    assert client.run(g).shown(shown) == [value]


def test_naps_overlap(client: Client, within: Callable[..., None]) -> None:
    def run() -> None:
        g = graph()
        naps = [g.node("TrialNap", value=fresh(), seconds=NAP_S) for _ in range(8)]
        links = {f"n{i}": nap.out(0) for i, nap in enumerate(naps)}
        shown = g.node("TrialShow", value=g.node("TrialSum", **links).out(0))
        done = client.run(g)
        assert done.shown(shown) == [sum(nap.get_input("value") for nap in naps)]
        started = [done.ran.index(nap.id) for nap in naps]
        assert max(started) < done.ran.index(shown.id)

    within(8 * NAP_S * 0.8, run, slack=0)


def test_naps_that_wait_for_each_other_do_not(client: Client) -> None:
    g = graph()
    value = fresh()
    first = g.node("TrialNap", value=value, seconds=0.02)
    second = g.node("TrialNap", value=first.out(0), seconds=0.02)
    shown = g.node("TrialShow", value=second.out(0))
    done = client.run(g)
    assert done.shown(shown) == [value]
    assert done.ran == [first.id, second.id, shown.id]


def test_others_run_while_one_naps(client: Client) -> None:
    g = graph()
    value = fresh()
    nap = g.node("TrialNap", value=value, seconds=NAP_S)
    quick = g.node("TrialShow", value=g.node("TrialAdd", a=value, b=1).out(0))
    slow = g.node("TrialShow", value=nap.out(0))
    done = client.run(g)
    assert (done.shown(quick), done.shown(slow)) == ([value + 1], [value])
    executed = [data["node"] for data in done.data("executed")]
    assert executed == [quick.id, slow.id]


def test_items_of_a_list_nap_side_by_side(client: Client, within: Callable[..., None]) -> None:
    def run() -> None:
        g = graph()
        numbers = g.node("TrialAdd", a=g.node("TrialRange", count=8).out(0), b=fresh())
        shown = g.node(
            "TrialShow", value=g.node("TrialNap", value=numbers.out(0), seconds=NAP_S).out(0)
        )
        assert len(client.run(g).shown(shown)) == 8

    within(8 * NAP_S * 0.8, run, slack=0)


def test_results_keep_the_order_of_the_list_whoever_wakes_first(client: Client) -> None:
    g = graph()
    numbers = g.node("TrialReverse", values=g.node("TrialRange", count=5).out(0))
    shown = g.node(
        "TrialShow", value=g.node("TrialNapBlocking", value=numbers.out(0), seconds=0).out(0)
    )
    assert client.run(g).shown(shown) == [8, 6, 4, 2, 0]


def test_naps_of_an_expansion_overlap(client: Client, within: Callable[..., None]) -> None:
    def run() -> None:
        g = graph()
        seconds = NAP_S + fresh() * 1e-6
        shown = g.node("TrialShow", value=g.node("TrialNapGroup", value=8, seconds=seconds).out(0))
        assert client.run(g).shown(shown) == [28]

    within(8 * NAP_S * 0.8, run, slack=0)


def test_an_async_node_may_expand(client: Client) -> None:
    g = graph()
    value = fresh()
    shown = g.node("TrialShow", value=g.node("TrialNapTwice", value=value, seconds=0.01).out(0))
    assert client.run(g).shown(shown) == [2 * value]


def test_an_async_node_may_wait_for_much_at_once(client: Client) -> None:
    g = graph()
    shown = g.node("TrialShow", value=g.node("TrialNapMany", value=10, seconds=0.02).out(0))
    assert client.run(g).shown(shown) == [45]


def test_an_async_node_may_lose_patience(client: Client) -> None:
    g = graph()
    shown = g.node("TrialShow", value=g.node("TrialNapAtMost", value=fresh(), seconds=20).out(0))
    assert client.run(g).shown(shown) == [-1]


def test_an_async_output_node(client: Client) -> None:
    g = graph()
    shown = g.node("TrialNapShow", value=fresh(), seconds=0.01)
    assert client.run(g).shown(shown) == [shown.get_input("value")]


@pytest.mark.parametrize("second", [True, False])
def test_an_async_choice_of_lazy_inputs(client: Client, second: bool) -> None:
    g = graph()
    naps = [g.node("TrialNap", value=fresh(), seconds=0.01) for _ in range(2)]
    chosen = g.node("TrialNapBetween", second=second, a=naps[0].out(0), b=naps[1].out(0))
    shown = g.node("TrialShow", value=chosen.out(0))
    done = client.run(g)
    assert done.shown(shown) == [naps[second].get_input("value")]
    assert naps[not second].id not in done.ran


@pytest.mark.parametrize("first", [True, False])
def test_an_async_choice_of_a_schema_node(client: Client, first: bool) -> None:
    g = graph()
    values = [g.node("TrialStamp", value=fresh(), always=True) for _ in range(2)]
    chosen = g.node("TrialSchemaEither", first=first, a=values[0].out(0), b=values[1].out(0))
    shown = g.node("TrialSchemaShow", value=chosen.out(0))
    done = client.run(g)
    assert done.shown(shown, "text") == [str(values[not first].get_input("value"))]
    assert values[first].id not in done.ran


def test_an_async_failure_names_its_node_and_the_server_lives(client: Client) -> None:
    g = graph()
    failing = g.node("TrialNapThenFail", value=fresh(), seconds=0.01)
    g.node("TrialShow", value=failing.out(0))
    error = client.run(g).error
    assert (error["node_id"], error["exception_type"]) == (failing.id, "RuntimeError")
    assert "woke up badly" in error["exception_message"]
    after = graph()
    shown = after.node("TrialShow", value=fresh())
    assert client.run(after).shown(shown)


def test_a_plain_failure_ends_the_naps_beside_it(
    client: Client, within: Callable[..., None]
) -> None:
    def run() -> None:
        g = graph()
        nap = g.node("TrialNap", value=fresh(), seconds=30)
        g.node("TrialShow", value=nap.out(0))
        failing = g.node("TrialRaise", value=1, kind="ValueError")
        g.node("TrialShow", value=failing.out(0))
        assert client.run(g).error["node_id"] == failing.id

    within(20, run, slack=0)


def test_the_first_of_several_failures_is_reported_once(client: Client) -> None:
    g = graph()
    slow, quick = (g.node("TrialNapThenFail", value=fresh(), seconds=s) for s in (5, 0.01))
    for node in (slow, quick):
        g.node("TrialShow", value=node.out(0))
    done = client.run(g)
    assert [error["node_id"] for error in done.data("execution_error")] == [quick.id]


def test_two_prompts_one_after_the_other(client: Client) -> None:
    prompts = []
    for _ in range(2):
        g = graph()
        g.node("TrialNapShow", id="shown", value=fresh(), seconds=0.05)
        prompts.append(g)
    ids = [client.queue(g) for g in prompts]
    for prompt_id, g in zip(ids, prompts):
        expected = g.lookup_node("shown").get_input("value")
        assert client.follow(prompt_id).shown("shown") == [expected]
