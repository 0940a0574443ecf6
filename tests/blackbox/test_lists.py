"""Lists in and out, and values that block what lies downstream."""

from __future__ import annotations

import pytest

from tests.blackbox.client import Client, fresh, graph


def test_a_list_output_is_handed_on_item_by_item(client: Client) -> None:
    g = graph()
    offset = fresh()
    numbers = g.node("TrialRange", count=4)
    added = g.node("TrialAdd", a=numbers.out(0), b=offset)
    shown = g.node("TrialShow", value=added.out(0))
    done = client.run(g)
    assert done.shown(shown) == [offset, offset + 1, offset + 2, offset + 3]
    assert done.ran.count(added.id) == 1


def test_short_lists_repeat_their_last_item(client: Client) -> None:
    g = graph()
    long, short = g.node("TrialRange", count=4), g.node("TrialRange", count=2)
    shown = g.node("TrialShow", value=g.node("TrialAdd", a=long.out(0), b=short.out(0)).out(0))
    assert client.run(g).shown(shown) == [0, 2, 3, 4]


def test_a_node_that_takes_lists_gets_everything_as_lists(client: Client) -> None:
    g = graph()
    numbers = g.node("TrialRange", count=3)
    shown = g.node(
        "TrialShow", value=g.node("TrialJoin", values=numbers.out(0), separator="-").out(0)
    )
    assert client.run(g).shown(shown) == ["0-1-2"]


def test_list_in_list_out(client: Client) -> None:
    g = graph()
    back = g.node("TrialReverse", values=g.node("TrialRange", count=3).out(0))
    shown = g.node("TrialShow", value=back.out(0))
    assert client.run(g).shown(shown) == [2, 1, 0]


def test_only_the_declared_output_is_a_list(client: Client) -> None:
    g = graph()
    spread = g.node("TrialSpread", count=g.node("TrialInt", value=3).out(0))
    shown = [g.node("TrialShow", value=spread.out(slot)) for slot in (0, 1)]
    done = client.run(g)
    assert [done.shown(node) for node in shown] == [[0, 1, 2], [3]]


def test_an_empty_list_is_an_error_that_names_source_slot_and_count(client: Client) -> None:
    g = graph()
    empty = g.node("TrialRange", count=0)
    added = g.node("TrialAdd", a=empty.out(0), b=1)
    g.node("TrialShow", value=added.out(0))
    error = client.run(g).error
    assert error["node_id"] == added.id
    for part in (f"output 0 of node {empty.id}", "0 values", "'a'"):
        assert part in error["exception_message"]


def test_an_empty_list_is_fine_for_who_takes_lists(client: Client) -> None:
    g = graph()
    empty = g.node("TrialRange", count=0)
    shown = g.node("TrialShow", value=g.node("TrialJoin", values=empty.out(0), separator="").out(0))
    assert client.run(g).shown(shown) == [""]


def test_a_silent_blocker_stops_its_branch_only(client: Client) -> None:
    g = graph()
    gate = g.node("TrialGate", value=g.node("TrialInt", value=1).out(0), is_open=False)
    behind = g.node("TrialAdd", a=gate.out(0), b=1)
    blocked = g.node("TrialShow", value=behind.out(0))
    free = g.node("TrialShow", value=2)
    done = client.run(g)
    assert done.shown(free) == [2]
    assert blocked.id not in done.entry["outputs"]
    assert done.error is None


def test_an_open_gate_blocks_nothing(client: Client) -> None:
    g = graph()
    gate = g.node("TrialGate", value=g.node("TrialInt", value=1).out(0), is_open=True)
    shown = g.node("TrialShow", value=gate.out(0))
    assert client.run(g).shown(shown) == [1]


def test_a_blocker_with_a_message_is_shown_at_the_first_consumer(client: Client) -> None:
    g = graph()
    gate = g.node("TrialGate", value=5, is_open=False, message="not today")
    first = g.node("TrialReverse", values=gate.out(0))
    g.node("TrialShow", value=first.out(0))
    done = client.run(g)
    assert done.succeeded
    errors = done.data("execution_error")
    assert [error["node_id"] for error in errors] == [first.id]
    assert errors[0]["exception_type"] == "ExecutionBlocked"
    assert "not today" in errors[0]["exception_message"]
    assert "execution_error" not in dict(done.entry["status"]["messages"])


def test_a_blocked_item_of_a_list_blocks_only_itself(client: Client) -> None:
    g = graph()
    even = g.node("TrialDropOdd", value=g.node("TrialRange", count=5).out(0))
    shown = g.node("TrialShow", value=g.node("TrialAdd", a=even.out(0), b=100).out(0))
    assert client.run(g).shown(shown) == [100, 102, 104]


@pytest.mark.parametrize("value", [-1, 0])
def test_schema_nodes_block_too(client: Client, value: int) -> None:
    g = graph()
    node = g.node("TrialSchemaTwice", value=value)
    blocked = g.node("TrialSchemaShow", value=node.out(0))
    done = client.run(g)
    assert done.succeeded
    assert done.entry["outputs"] == {}
    errors = done.data("execution_error")
    if value == 0:
        assert errors == []
    else:
        assert [error["node_id"] for error in errors] == [blocked.id]
        assert "nothing to double" in errors[0]["exception_message"]


def test_a_blocker_of_a_lazy_choice_reaches_only_who_chose_it(client: Client) -> None:
    g = graph()
    gate = g.node("TrialGate", value=1, is_open=False)
    either = [
        g.node("TrialEither", condition=chosen, if_true=gate.out(0), if_false=3)
        for chosen in (True, False)
    ]
    shown = [g.node("TrialShow", value=node.out(0)) for node in either]
    done = client.run(g)
    assert done.shown(shown[1]) == [3]
    assert shown[0].id not in done.entry["outputs"]
