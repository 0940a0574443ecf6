"""Nodes that misbehave fail their own prompt and nothing else."""

from __future__ import annotations

import pytest

from tests.blackbox.client import Client, fresh, graph
from tests.blackbox.conftest import only_classic

KINDS = (
    "ValueError", "SystemExit", "KeyboardInterrupt", "RecursionError", "MemoryError",
    "WorseThanException", "StopIteration", "GeneratorExit", "CancelledError", "Unprintable",
)  # fmt: skip


@pytest.mark.parametrize("node_class", ["TrialRaise", "TrialRaiseAsync"])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_a_node_raises_the_worker_lives(
    client: Client, node_class: str, kind: str
) -> None:
    g = graph()
    before = g.node("TrialShowAndPass", value=fresh())
    failing = g.node(node_class, id="failing", value=before.out(0), kind=kind)
    g.node("TrialShow", value=failing.out(0))
    done = client.run(g)
    assert not done.succeeded
    assert len(done.data("execution_error")) == 1
    error = done.error
    assert (error["node_id"], error["node_type"]) == ("failing", node_class)
    assert error["exception_type"].split(".")[-1] == kind
    assert error["current_inputs"]["kind"] == [kind]
    assert error["traceback"]
    assert before.id in error["executed"]
    assert done.entry["outputs"][before.id]["value"]
    after = graph()
    shown = after.node("TrialShow", value=fresh())
    assert client.run(after).shown(shown)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("none", "returned None"),
        ("number", "int"),
        ("short", "no output"),
        ("nan in ui", "value"),
        ("infinity in ui", "value"),
        ("object in ui", "object"),
    ],
)
def test_a_result_that_is_none_is_an_error_of_its_node(
    client: Client, kind: str, text: str
) -> None:
    g = graph()
    odd = g.node("TrialOdd", id="odd", kind=kind)
    user = g.node("TrialShow", value=odd.out(0))
    error = client.run(g).error
    assert error["node_id"] in ("odd", user.id)
    assert text in error["exception_message"]
    assert "odd" in error["exception_message"] + error["node_id"]


def test_a_ui_value_that_is_no_list_becomes_one(client: Client) -> None:
    g = graph()
    odd = g.node("TrialOdd", id="odd", kind="ui without list")
    g.node("TrialShow", value=odd.out(0))
    assert client.run(g).shown("odd") == ["text"]


def test_a_list_output_that_is_no_list_names_the_output(client: Client) -> None:
    g = graph()
    odd = g.node("TrialOddList", id="odd", kind="not a list")
    g.node("TrialShow", value=odd.out(0))
    error = client.run(g).error
    assert error["node_id"] == "odd"
    assert "output 0 of TrialOddList" in error["exception_message"]


@only_classic
def test_every_prompt_ends_with_one_terminal_event(client: Client) -> None:
    ends = {"execution_success", "execution_error", "execution_interrupted"}
    for kind in (None, "ValueError", "SystemExit"):
        g = graph()
        node = (
            g.node("TrialInt", value=1)
            if kind is None
            else g.node("TrialRaise", value=1, kind=kind)
        )
        g.node("TrialShow", value=node.out(0))
        done = client.run(g)
        assert len([frame for frame in done.frames if frame["type"] in ends]) == 1
        assert len([kind for kind, _ in done.entry["status"]["messages"] if kind in ends]) == 1
