"""Deep, wide and endless graphs: linear time, no recursion, clear limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.blackbox.client import Client, fresh, graph
from tests.blackbox.conftest import only_classic
from tests.blackbox.test_expansion import for_loop

Within = Callable[..., None]

both = pytest.mark.parametrize("house", ["classic", "none"], indirect=True)
"""A policy that keeps everything, and one that lets go as early as it can."""


@both
def test_five_thousand_nodes_in_a_chain(client: Client, within: Within) -> None:
    def run() -> None:
        g = graph()
        start = fresh()
        last = g.node("TrialInt", value=start)
        for _ in range(5000):
            last = g.node("TrialAdd", a=last.out(0), b=1)
        shown = g.node("TrialShow", value=last.out(0))
        assert client.run(g).shown(shown) == [start + 5000]

    within(8.0, run)


@both
def test_two_thousand_nodes_into_one(client: Client, within: Within) -> None:
    def run() -> None:
        g = graph()
        start = fresh()
        numbers = [g.node("TrialInt", value=start + n) for n in range(2000)]
        links = {f"n{i}": number.out(0) for i, number in enumerate(numbers)}
        shown = g.node("TrialShow", value=g.node("TrialSum", **links).out(0))
        assert client.run(g).shown(shown) == [2000 * start + 1999 * 1000]

    within(6.0, run)


@only_classic
def test_two_thousand_nodes_in_a_circle(client: Client, within: Within) -> None:
    def run() -> None:
        g = graph()
        nodes = [g.node("TrialAdd", b=1) for _ in range(2000)]
        for i, node in enumerate(nodes):
            node.set_input("a", nodes[i - 1].out(0))
        g.node("TrialShow", value=nodes[0].out(0))
        answer = client.refused(g)
        assert "dependency_cycle" in str(answer)
        assert len(str(answer)) < 1_000_000

    within(3.0, run)


def walk(value: Any) -> int:
    """Depth of nested lists."""
    depth = 0
    while isinstance(value, list) and value:
        value, depth = value[0], depth + 1
    return depth


@only_classic
@pytest.mark.parametrize("depth", [100, 100_000])
def test_a_deeply_nested_constant(client: Client, depth: int) -> None:
    text = '{"prompt": {"1": {"class_type": "TrialShow", "inputs": {"value": {"__value__": %s}}}}}'
    body = text % ("[" * depth + "]" * depth)
    status, answer = client.server.post("/prompt", body.encode())
    if depth > 10_000:
        assert status == 400
        assert answer["error"]["message"]
    else:
        assert status == 200
        entry = client.server.wait(answer["prompt_id"])
        assert walk(entry["outputs"]["1"]["value"][0]) == depth - 1


@only_classic
def test_a_loop_of_a_thousand_million_turns_meets_a_clear_limit(
    client: Client, within: Within
) -> None:
    def run() -> None:
        entry = client.server.run(for_loop(10**9, fresh()).finalize())  # nobody follows: less to do
        kind, error = entry["status"]["messages"][-1]
        assert kind == "execution_error"
        assert error["exception_type"].endswith("GraphLimitError")
        for part in ("10000", "iterations"):
            assert part in error["exception_message"]

    within(30.0, run)


@both
def test_two_hundred_turns_of_a_loop(client: Client, within: Within) -> None:
    def run() -> None:
        start = fresh()
        assert client.run(for_loop(200, start)).shown("shown") == [start + 200 * 201 // 2]

    within(4.0, run)
