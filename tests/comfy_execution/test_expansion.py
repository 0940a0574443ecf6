"""Nodes that put a graph in their place: nesting, loops, lists, caches, limits."""

from __future__ import annotations

from typing import Any

import pytest

from comfy_execution import executor, graph, progress
from comfy_execution.graph_utils import GraphBuilder, add_graph_prefix, is_link
from tests.comfy_execution.support import (
    POLICIES,
    Add,
    Bench,
    NodeBase,
    Number,
    Show,
    all_caches,
    make,
    node,
)


class AddTwice(NodeBase):
    """value + step + step, by a graph of two Add nodes."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("INT",), "step": ("INT",)}}

    def run(self, value: int, step: int) -> dict[str, Any]:
        self.calls.append(value)
        build = GraphBuilder()
        first = build.node("Add", a=value, b=step)
        second = build.node("Add", a=first.out(0), b=step)
        return {"result": (second.out(0),), "expand": build.finalize()}


class CountDown(NodeBase):
    """Expands into itself until the count is used up: count + count-1 + ... + total."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"count": ("INT",), "total": ("INT",)}}

    def run(self, count: int, total: int) -> Any:
        self.calls.append(count)
        if count == 0:
            return (total,)
        build = GraphBuilder()
        added = build.node("Add", a=total, b=count)
        again = build.node("CountDown", count=count - 1, total=added.out(0))
        return {"result": (again.out(0),), "expand": build.finalize()}


class WhileOpen(NodeBase):
    RETURN_TYPES = ("FLOW", "INT")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("INT",)}}

    def run(self, value: int) -> tuple[str, int]:
        return ("flow", value)


class WhileClose(NodeBase):
    """Repeats everything between open and close while value < limit, by copying the graph."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"flow": ("FLOW", {"rawLink": True}), "value": ("INT",), "limit": ("INT",)},
            "hidden": {"dynprompt": "DYNPROMPT", "unique_id": "UNIQUE_ID"},
        }

    def run(self, flow: Any, value: int, limit: int, dynprompt: Any, unique_id: str) -> Any:
        if value >= limit:
            return (value,)
        contained = self.between(flow[0], unique_id, dynprompt)
        build = GraphBuilder()
        for old_id in contained:
            old = dynprompt.get_node(old_id)
            new = build.node(old["class_type"], old_id)
            new.set_override_display_id(dynprompt.get_display_node_id(old_id))
        for old_id in contained:
            new = build.lookup_node(old_id)
            for name, given in dynprompt.get_node(old_id)["inputs"].items():
                if is_link(given) and given[0] in contained:
                    given = build.lookup_node(given[0]).out(given[1])
                new.set_input(name, given)
        build.lookup_node(flow[0]).set_input("value", value)
        closing = build.lookup_node(unique_id)
        return {"result": (closing.out(0),), "expand": build.finalize()}

    def between(self, start: str, end: str, dynprompt: Any) -> list[str]:
        """Nodes on the way from start to end, both included."""
        consumers: dict[str, set[str]] = {}
        seen, stack = {end}, [end]
        while stack:
            current = stack.pop()
            for given in dynprompt.get_node(current)["inputs"].values():
                if is_link(given):
                    consumers.setdefault(given[0], set()).add(current)
                    if given[0] not in seen:
                        seen.add(given[0])
                        stack.append(given[0])
        found, stack = {start}, [start]
        while stack:
            for consumer in consumers.get(stack.pop(), ()):
                if consumer not in found:
                    found.add(consumer)
                    stack.append(consumer)
        return sorted(found)


EXPANDING = {kind.__name__: kind for kind in (AddTwice, CountDown, WhileOpen, WhileClose)}


@pytest.fixture(params=POLICIES)
def bench(request: pytest.FixtureRequest) -> Bench:
    for kind in EXPANDING.values():
        kind.calls.clear()
    return Bench(all_caches()[request.param], EXPANDING)


@pytest.fixture
def classic() -> Bench:
    for kind in EXPANDING.values():
        kind.calls.clear()
    return Bench(classes=EXPANDING)


TWICE = {
    "1": make("Number", value=1),
    "2": make("AddTwice", value=["1", 0], step=10),
    "3": make("Show", value=["2", 0]),
}


def test_an_expanded_node_gives_the_result_of_its_graph(bench: Bench) -> None:
    assert bench.values(bench.run(TWICE)) == {"3": [21]}
    assert len(AddTwice.calls) == 1
    assert len(Add.calls) == 2


def test_expanded_nodes_name_parent_display_and_real_node(classic: Bench) -> None:
    classic.run(TWICE)
    last = classic.sink.named("progress_state")[-1]["nodes"]
    child = last["2.0.0.1"]
    assert (child["parent_node_id"], child["display_node_id"], child["real_node_id"]) == (
        "2", "2", "2",
    )  # fmt: skip
    assert all(entry["state"] == "finished" for entry in last.values())
    executing = [(data["node"], data["display_node"]) for data in classic.sink.named("executing")]
    assert executing == [("1", "1"), ("2", "2"), ("2.0.0.1", "2"), ("2.0.0.2", "2"), ("3", "3")]


def test_self_recursion(bench: Bench) -> None:
    prompt = {"1": make("CountDown", count=30, total=0), "2": make("Show", value=["1", 0])}
    result = bench.run(prompt)
    assert bench.values(result) == {"2": [sum(range(31))]}
    assert CountDown.calls == list(range(30, -1, -1))


def test_a_deep_recursion_neither_recurses_nor_makes_endless_ids(classic: Bench) -> None:
    result = classic.run(
        {"1": make("CountDown", count=1500, total=0), "2": make("Show", value=["1", 0])}
    )
    assert classic.values(result) == {"2": [sum(range(1501))]}
    assert max(map(len, classic.executor.history_result["nodes"])) < 250


def test_a_loop_copies_the_graph_between_its_ends(bench: Bench) -> None:
    prompt = {
        "base": make("Number", value=2),
        "open": make("WhileOpen", value=0),
        "body": make("Add", a=["open", 1], b=["base", 0]),
        "close": make("WhileClose", flow=["open", 0], value=["body", 0], limit=9),
        "show": make("Show", value=["close", 0]),
    }
    assert bench.values(bench.run(prompt)) == {"show": [10]}
    assert Number.calls == [2]  # the node outside of the loop ran once
    assert Add.calls == [(0, 2), (2, 2), (4, 2), (6, 2), (8, 2)]


def test_one_more_turn_of_a_loop_repeats_none_of_the_others(classic: Bench) -> None:
    def prompt(limit: int) -> dict[str, Any]:
        return {
            "open": make("WhileOpen", value=0),
            "body": make("Add", a=["open", 1], b=1),
            "close": make("WhileClose", flow=["open", 0], value=["body", 0], limit=limit),
            "show": make("Show", value=["close", 0]),
        }

    assert classic.values(classic.run(prompt(3))) == {"show": [3]}
    before = len(Add.calls)
    assert classic.values(classic.run(prompt(4))) == {"show": [4]}
    assert len(Add.calls) == before + 1


def test_output_nodes_of_the_graph_run_too(bench: Bench) -> None:
    def run(self: Any) -> dict[str, Any]:
        build = GraphBuilder()
        build.node("Show", value=5)
        return {"result": (1,), "expand": build.finalize()}

    bench.registry.classes["Shows"] = node("Shows", run=run)  # type: ignore[index]
    result = bench.run({"1": make("Shows"), "2": make("Show", value=["1", 0])})
    assert bench.values(result) == {"1.0.0.1": [5], "2": [1]}
    assert result["meta"]["1.0.0.1"] == {
        "node_id": "1.0.0.1", "display_node": "1", "parent_node": "1", "real_node_id": "1",
    }  # fmt: skip


def test_what_an_expanded_graph_showed_is_in_the_history_of_the_cached_rerun(
    classic: Bench,
) -> None:
    def run(self: Any) -> dict[str, Any]:
        build = GraphBuilder()
        build.node("Show", value=5)
        return {"result": (1,), "expand": build.finalize()}

    classic.registry.classes["Shows"] = node("Shows", run=run)  # type: ignore[index]
    prompt = {"1": make("Shows"), "2": make("Show", value=["1", 0])}
    classic.run(prompt)
    assert classic.values(classic.run(prompt)) == {"1.0.0.1": [5], "2": [1]}
    assert Show.calls == [5, 1]


def test_a_node_that_runs_over_a_list_may_expand_for_each_item(classic: Bench) -> None:
    numbers = node("Numbers", OUTPUT_IS_LIST=(True,), run=lambda self: ([1, 2, 3],))
    classic.registry.classes["Numbers"] = numbers  # type: ignore[index]
    prompt = {
        "1": make("Numbers"),
        "2": make("AddTwice", value=["1", 0], step=10),
        "3": make("Show", value=["2", 0]),
    }
    assert classic.values(classic.run(prompt)) == {"3": [21, 22, 23]}


def test_some_calls_may_expand_and_others_return_values(classic: Bench) -> None:
    numbers = node("Counts", OUTPUT_IS_LIST=(True,), run=lambda self: ([0, 2, 0],))
    classic.registry.classes["Counts"] = numbers  # type: ignore[index]
    prompt = {
        "1": make("Counts"),
        "2": make("CountDown", count=["1", 0], total=100),
        "3": make("Show", value=["2", 0]),
    }
    assert classic.values(classic.run(prompt)) == {"3": [100, 103, 100]}


def test_a_list_output_of_the_graph_becomes_the_list_output_of_the_node(classic: Bench) -> None:
    numbers = node("Numbers", OUTPUT_IS_LIST=(True,), run=lambda self: ([1, 2, 3],))

    def run(self: Any) -> dict[str, Any]:
        build = GraphBuilder()
        inner = build.node("Numbers")
        return {"result": (inner.out(0),), "expand": build.finalize()}

    outer = node("Outer", OUTPUT_IS_LIST=(True,), run=run)
    classic.registry.classes |= {"Numbers": numbers, "Outer": outer}  # type: ignore[operator]
    prompt = {
        "1": make("Outer"),
        "2": make("Add", a=["1", 0], b=1),
        "3": make("Show", value=["2", 0]),
    }
    assert classic.values(classic.run(prompt)) == {"3": [2, 3, 4]}


def test_a_live_object_may_be_a_constant_of_the_graph(classic: Bench) -> None:
    thing = object()
    inputs = {"required": {"thing": ("*",)}}
    keep = node("Keep", inputs, run=lambda self, thing: (thing is not None,))

    def run(self: Any) -> dict[str, Any]:
        build = GraphBuilder()
        kept = build.node("Keep", thing=thing)
        return {"result": (kept.out(0),), "expand": build.finalize()}

    classic.registry.classes |= {"Keep": keep, "Gives": node("Gives", run=run)}  # type: ignore[operator]
    result = classic.run({"1": make("Gives"), "2": make("Show", value=["1", 0])})
    assert classic.values(result) == {"2": [True]}


def test_a_failure_inside_names_the_posted_node_and_the_inner_one(classic: Bench) -> None:
    def run(self: Any) -> dict[str, Any]:
        build = GraphBuilder()
        inner = build.node("Fail", value=1)
        return {"result": (inner.out(0),), "expand": build.finalize()}

    classic.registry.classes["Outer"] = node("Outer", run=run)  # type: ignore[index]
    classic.run({"1": make("Outer"), "2": make("Show", value=["1", 0])})
    assert classic.error["node_id"] == "1"
    assert classic.error["expanded_node_id"] == "1.0.0.1"


def test_a_cycle_made_by_expansion_is_blamed_on_the_posted_node(classic: Bench) -> None:
    def run(self: Any) -> dict[str, Any]:
        build = GraphBuilder()
        one = build.node("Add", b=1)
        two = build.node("Add", a=one.out(0), b=1)
        one.set_input("a", two.out(0))
        return {"result": (two.out(0),), "expand": build.finalize()}

    classic.registry.classes["Loops"] = node("Loops", run=run)  # type: ignore[index]
    classic.run({"1": make("Loops"), "2": make("Show", value=["1", 0])})
    assert classic.error["node_id"] == "1"
    assert "cycle" in classic.error["exception_message"]


def test_ids_that_exist_already_are_refused(classic: Bench) -> None:
    def run(self: Any) -> dict[str, Any]:
        return {"result": (["2", 0],), "expand": {"2": make("Number", value=1)}}

    classic.registry.classes["Clash"] = node("Clash", run=run)  # type: ignore[index]
    classic.run({"1": make("Clash"), "2": make("Show", value=["1", 0])})
    assert "exists already" in classic.error["exception_message"]


@pytest.mark.parametrize("limit", ["MAX_DEPTH", "MAX_NODES"])
def test_a_loop_that_does_not_end_meets_a_limit(
    classic: Bench, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(graph, limit, 50)
    classic.run({"1": make("CountDown", count=10**9, total=0), "2": make("Show", value=["1", 0])})
    assert classic.error["exception_type"].endswith("GraphLimitError")
    assert "50" in classic.error["exception_message"]


def test_a_long_loop_makes_neither_frames_nor_errors_that_grow_with_it(
    classic: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "MAX_DEPTH", 300)
    monkeypatch.setattr(progress, "MOST_EXPANDED", 50)
    monkeypatch.setattr(executor, "MOST_EXPANDED_NAMED", 20)
    prompt = {
        "1": make("CountDown", count=10**9, total=0),
        "2": make("Show", value=["1", 0]),
        "3": make("Show", value=7),
    }
    classic.run(prompt)
    last = classic.sink.named("progress_state")[-1]["nodes"]
    assert {"1", "3"} <= set(last)
    assert len(last) <= 3 + 50
    assert "3" in classic.error["executed"]
    assert len(classic.error["executed"]) <= 3 + 20
    assert len(classic.error["current_outputs"]) <= 3 + 20


def test_expansion_into_an_unknown_class_is_an_error_of_the_node(classic: Bench) -> None:
    def run(self: Any) -> dict[str, Any]:
        return {"result": (["x", 0],), "expand": {"x": make("NoSuchNode")}}

    classic.registry.classes["Unknown"] = node("Unknown", run=run)  # type: ignore[index]
    classic.run({"1": make("Unknown"), "2": make("Show", value=["1", 0])})
    assert classic.error["node_id"] == "1"
    assert "NoSuchNode" in classic.error["exception_message"]


def test_a_graph_is_renamed_by_a_prefix() -> None:
    renamed, outputs = add_graph_prefix(
        {"a": make("Add", a=["b", 0], b=["out", 1]), "b": make("Number", value=1)},
        (["a", 0], 5),
        "p.",
    )
    assert renamed["p.a"]["inputs"] == {"a": ["p.b", 0], "b": ["out", 1]}
    assert outputs == (["p.a", 0], 5)


def test_a_builder_replaces_and_removes() -> None:
    build = GraphBuilder("x.")
    one = build.node("Number", "one", value=1)
    two = build.node("Add", a=one.out(0), b=one.out(0))
    build.replace_node_output("one", 0, 7)
    assert two.inputs == {"a": 7, "b": 7}
    build.remove_node("one")
    assert list(build.finalize()) == ["x.1"]
    assert build.lookup_node("one") is None
