"""Schema-declared nodes, beside classic ones in the same graphs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.blackbox.client import Client, fresh, graph


def test_both_generations_in_one_chain(client: Client) -> None:
    g = graph()
    number = g.node("TrialInt", value=40)
    added = g.node("TrialSchemaAdd", a=number.out(0))
    turned = g.node("TrialEntryNegative", value=added.out(0))
    shown = g.node("TrialShow", value=g.node("TrialAdd", a=turned.out(0), b=1).out(0))
    assert client.run(g).shown(shown) == [-40]


def test_an_optional_input_has_its_default_or_a_link(client: Client) -> None:
    g = graph()
    sums = [
        g.node("TrialSchemaAdd", a=1),
        g.node("TrialSchemaAdd", a=1, b=5),
        g.node("TrialSchemaAdd", a=1, b=g.node("TrialInt", value=7).out(0)),
    ]
    shown = [g.node("TrialSchemaShow", value=node.out(0)) for node in sums]
    done = client.run(g)
    assert [done.shown(node, "text") for node in shown] == [["2"], ["6"], ["8"]]


def test_a_range_is_checked(client: Client) -> None:
    g = graph()
    g.node("TrialSchemaShow", value=g.node("TrialSchemaAdd", id="sum", a=101).out(0))
    errors = client.refused(g)["node_errors"]["sum"]["errors"]
    assert [error["type"] for error in errors] == ["value_bigger_than_max"]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({"numbers.n0": 2, "how": "sum"}, [2]),
        ({"numbers.n0": 2, "numbers.n1": 3, "how": "scaled", "how.by": 10}, [20, 30]),
    ],
)
def test_dynamic_inputs(client: Client, inputs: dict[str, Any], expected: list[int]) -> None:
    g = graph()
    node = g.node("TrialSchemaDynamic", **inputs)
    shown = g.node("TrialShow", value=g.node("TrialAdd", a=node.out(0), b=0).out(0))
    assert client.run(g).shown(shown) == expected


@pytest.mark.parametrize(
    "inputs", [{"how": "sum"}, {"numbers.n0": 1, "how": "scaled"}, {"numbers.n0": 1, "how": "?"}]
)
def test_dynamic_inputs_that_are_missing(client: Client, inputs: dict[str, Any]) -> None:
    g = graph()
    g.node("TrialShow", value=g.node("TrialSchemaDynamic", id="node", **inputs).out(0))
    assert client.refused(g)["node_errors"]["node"]["errors"]


def test_linked_dynamic_inputs_of_several_kinds(client: Client) -> None:
    g = graph()
    number = fresh()
    links = {f"numbers.n{i}": g.node("TrialInt", value=number + i).out(0) for i in range(3)}
    node = g.node("TrialSchemaDynamic", how="sum", **links)
    shown = g.node("TrialShow", value=node.out(0))
    assert client.run(g).shown(shown) == [number, number + 1, number + 2]


def test_a_whole_list_and_hidden_values(client: Client) -> None:
    g = graph()
    numbers = g.node("TrialRange", id="range", count=5)
    total = g.node("TrialSchemaTotal", id="total", values=numbers.out(0))
    g.node("TrialSchemaShow", id="shown", value=total.out(0))
    done = client.run(g, extra_data={"extra_pnginfo": {"workflow": {"id": "w"}}})
    expected = "10 in total of ['range', 'shown', 'total'] {'workflow': {'id': 'w'}}"
    assert done.shown("shown", "text") == [expected]
