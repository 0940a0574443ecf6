"""Parts of a graph that run several times."""

from __future__ import annotations

from typing import Any

import pytest

from comfy.interrupt import Interrupt
from comfy_api.latest import io
from comfy_execution import text_limit
from comfy_execution.caching import CacheType, make_cache
from comfy_execution.executor import ExecutorOptions, PromptExecutor
from comfy_execution.registry import NodeRegistry
from comfy_extras import nodes_lists, nodes_loops, nodes_math, nodes_primitive, nodes_string

calls: list[Any] = []


class Sink:
    """Hears nothing."""

    client_id = last_node_id = None

    def publish(self, event: Any) -> None:
        pass


class Noted(io.ComfyNode):
    """Hands on a value and notes that it did."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        value = io.AnyType.Input("value")
        return io.Schema("Noted", inputs=[value], outputs=[io.AnyType.Output()])

    @classmethod
    def execute(cls, value: Any) -> io.NodeOutput:
        calls.append(value)
        return io.NodeOutput(value)


class ShowAll(io.ComfyNode):
    """Shows each value it is given."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema("ShowAll", inputs=[io.AnyType.Input("value")], is_output_node=True)

    @classmethod
    def execute(cls, value: Any) -> io.NodeOutput:
        return io.NodeOutput(ui={"text": [str(value)]})


NODES = {
    "StartLoop": nodes_loops.StartLoop,
    "LoopRound": nodes_loops.LoopRound,
    "EndLoop": nodes_loops.EndLoop,
    "LoopTurn": nodes_loops.LoopTurn,
    "CreateList": nodes_lists.CreateList,
    "GetItemFromList": nodes_lists.GetItemFromList,
    "Math": nodes_math.MathExpression,
    "Int": nodes_primitive.Int,
    "Format": nodes_string.StringFormat,
    "Noted": Noted,
    "ShowAll": ShowAll,
}
Graph = dict[str, tuple[str, dict[str, Any]]]


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


def ran(graph: Graph, executor: PromptExecutor | None = None) -> PromptExecutor:
    prompt = {name: {"class_type": kind, "inputs": given} for name, (kind, given) in graph.items()}
    executor = executor or PromptExecutor(NodeRegistry(NODES), Sink())
    executor.execute(prompt, "p", {}, ["show"])
    return executor


def shown(graph: Graph, executor: PromptExecutor | None = None) -> list[str]:
    """What the node `show` was given."""
    executor = ran(graph, executor)
    assert executor.success, executor.status_messages[-1]
    return list(executor.history_result["outputs"].get("show", {}).get("text", []))


def start(mode: str = "simple", **more: Any) -> tuple[str, dict[str, Any]]:
    cache = more.pop("cache_iterations", False)
    names = {"value": "initial_iteration_value", "parent": "parent_iteration"}
    given = {names[key]: more.pop(key) for key in list(more) if key in names}
    chosen = {f"mode.{key}": value for key, value in more.items()}
    return "StartLoop", {"mode": mode, **chosen, "cache_iterations": cache, **given}


def end(accumulate: bool = False, **links: Any) -> tuple[str, dict[str, Any]]:
    return "EndLoop", {"accumulate": accumulate, **links}


SHOW = ("ShowAll", {"value": ["end", 0]})


def doubling(**first: Any) -> Graph:
    """Doubles a number in each round, from 3 on."""
    double = ("Math", {"expression": "a * 2", "values.a": ["start", 4]})
    ends = end(output_value=["double", 1], next_iteration_value=["double", 1])
    begun = start(**{"value": 3, "num_iterations": 4, **first})
    return {"start": begun, "double": double, "end": ends, "show": SHOW}


@pytest.mark.parametrize(
    ("count", "expected"), [(1, "6"), (2, "12"), (4, "48"), (40, str(3 << 40))]
)
def test_a_value_goes_from_round_to_round(count: int, expected: str) -> None:
    assert shown(doubling(num_iterations=count)) == [expected]


def test_the_number_of_rounds_may_come_from_the_graph() -> None:
    graph = doubling(num_iterations=["count", 0])
    graph["count"] = ("Int", {"value": 3})
    assert shown(graph) == ["24"]


def test_values_of_all_rounds_come_out_in_order() -> None:
    graph = doubling()
    graph["end"][1]["accumulate"] = True
    assert shown(graph) == ["6", "12", "24", "48"]


def counting(*slots: int, **first: Any) -> Graph:
    """Shows outputs of the start in each round."""
    names = dict(zip("abc", slots))
    places = {f"values.{name}": ["start", slot] for name, slot in names.items()}
    text = ("Format", {"f_string": " ".join(f"{{{name}}}" for name in names), **places})
    ends = end(True, output_value=["text", 0])
    return {"start": start(**first), "text": text, "end": ends, "show": SHOW}


def test_rounds_know_their_index_and_which_is_first_and_last() -> None:
    assert shown(counting(0, 1, 2, num_iterations=3)) == [
        "0 True False", "1 False False", "2 False True",
    ]  # fmt: skip
    spans = {"start_iteration_index": -2, "max_iteration": 5, "step": 3}
    assert shown(counting(0, 1, 2, mode="For", **spans)) == [
        "-2 True False", "1 False False", "4 False True",
    ]  # fmt: skip


def test_a_list_has_a_round_for_each_item() -> None:
    graph = counting(0, 3, mode="List", list=["items", 0])
    graph["items"] = ("CreateList", {"inputs.input0": "x", "inputs.input1": "y"})
    assert shown(graph) == ["0 x", "1 y"]


def test_a_value_that_is_not_handed_on_stays() -> None:
    assert shown(counting(0, 4, num_iterations=3, value="v")) == ["0 v", "1 v", "2 v"]


def test_a_list_goes_from_round_to_round() -> None:
    """Euclid's algorithm, as a published workflow has it."""
    pair = lambda a, b: ("CreateList", {"inputs.input0": a, "inputs.input1": b})  # noqa: E731
    item = lambda source, n: ("GetItemFromList", {"list": source, "index": n})  # noqa: E731
    values = {"values.a": ["a", 0], "values.b": ["b", 0]}
    graph = {
        "pair": pair(1344, 768),
        "start": start(value=["pair", 0], num_iterations=16),
        "a": item(["start", 4], 0),
        "b": item(["start", 4], 1),
        "rest": ("Math", {"expression": "a % b if b > 0 else 0", **values}),
        "divisor": ("Math", {"expression": "b if b > 0 else a", **values}),
        "next": pair(["divisor", 1], ["rest", 1]),
        "end": end(output_value=["next", 0], next_iteration_value=["next", 0]),
        "found": item(["end", 0], 0),
        "show": ("ShowAll", {"value": ["found", 0]}),
    }
    assert shown(graph) == ["192"]


def test_only_what_depends_on_the_start_and_leads_to_the_end_runs_again() -> None:
    graph = doubling()
    graph["outside"] = ("Noted", {"value": "outside"})
    graph["beside"] = ("Noted", {"value": ["start", 0]})
    graph["double"][1]["values.b"] = ["one", 0]
    graph["one"] = ("Int", {"value": 1})
    text = ("Format", {"f_string": "{a}{b}", "values.a": ["outside", 0], "values.b": ["start", 0]})
    graph["text"] = text
    graph["noted"] = ("Noted", {"value": ["text", 0]})
    graph["end"][1]["terminations.termination0"] = ["noted", 0]
    assert shown(graph) == ["48"]
    assert calls == ["outside", *(f"outside{n}" for n in range(4))]


def nested(**parent: Any) -> Graph:
    """Pairs of the indices of two loops, one in the other."""
    text = ("Format", {"f_string": "{a}{b}", "values.a": ["outer", 0], "values.b": ["inner", 0]})
    return {
        "outer": start(num_iterations=3),
        "inner": start(num_iterations=2, **parent),
        "text": text,
        "inner_end": end(True, output_value=["text", 0]),
        "end": end(True, output_value=["inner_end", 0]),
        "show": SHOW,
    }


def test_a_loop_runs_in_a_loop() -> None:
    expected = ["00", "01", "10", "11", "20", "21"]
    assert shown(nested(parent=["outer", 0])) == expected


@pytest.mark.parametrize("loops", [2, 20])
def test_loops_follow_each_other(loops: int) -> None:
    graph: Graph = {"end0": ("Int", {"value": 100})}
    for n in range(1, loops + 1):
        graph[f"start{n}"] = start(value=[f"end{n - 1}", 0], num_iterations=2)
        less = {"expression": "a - 1", "values.a": [f"start{n}", 4]}
        graph[f"less{n}"] = ("Math", less)
        link = [f"less{n}", 1]
        graph[f"end{n}"] = end(output_value=link, next_iteration_value=link)
    graph["show"] = ("ShowAll", {"value": [f"end{loops}", 0]})
    assert shown(graph) == [str(100 - 2 * loops)]


@pytest.mark.parametrize(
    "first", [{"num_iterations": 0}, {"mode": "For", "start_iteration_index": 4,
                                      "max_iteration": 4, "step": 1}]
)  # fmt: skip
def test_no_round_runs_nothing(first: dict[str, Any]) -> None:
    graph = counting(0, **first)
    graph["noted"] = ("Noted", {"value": ["start", 0]})
    graph["end"][1]["output_value"] = ["noted", 0]
    assert shown(graph) == []
    assert not calls


@pytest.mark.parametrize(("cache", "runs"), [(False, 8), (True, 4)])
def test_rounds_of_an_earlier_run_count_if_asked(cache: bool, runs: int) -> None:
    graph = counting(0, num_iterations=4, cache_iterations=cache)
    graph["noted"] = ("Noted", {"value": ["start", 0]})
    graph["end"][1]["output_value"] = ["noted", 0]
    executor = PromptExecutor(NodeRegistry(NODES), Sink())
    for _ in range(2):
        assert shown(graph, executor) == ["0", "1", "2", "3"]
    assert len(calls) == runs


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"end": end(output_value=5)}, "found 0 (none)"),
        ({"other": start(num_iterations=2), "text": ("Format", {
            "f_string": "{a}{b}", "values.a": ["start", 0], "values.b": ["other", 0]}),
          "end": end(output_value=["text", 0])}, "found 2 (other, start)"),
        ({"start": start("For", start_iteration_index=0, max_iteration=4, step=0, value=1)},
         "step: expected 1 or more, found 0"),
    ],
)  # fmt: skip
def test_a_loop_that_makes_no_sense_is_named(change: Graph, reason: str) -> None:
    executor = ran(doubling() | change)
    assert not executor.success
    assert reason in str(executor.status_messages[-1])


def test_many_rounds_are_run_one_by_one() -> None:
    assert shown(doubling(num_iterations=300)) == [str(3 << 300)]


@pytest.mark.parametrize("policy", CacheType)
def test_rounds_come_out_whatever_results_are_kept(policy: CacheType) -> None:
    cache = make_cache(policy, lru_size=1, free_bytes=lambda: 0)
    executor = PromptExecutor(NodeRegistry(NODES), Sink(), options=ExecutorOptions(cache=cache))
    for _ in range(2):
        assert shown(doubling(num_iterations=20), executor) == [str(3 << 20)]
        expected = ["00", "01", "10", "11", "20", "21"]
        assert shown(nested(parent=["outer", 0]), executor) == expected


@pytest.mark.parametrize(("accumulate", "most"), [(False, 8), (True, 30)])
def test_texts_of_rounds_are_counted_a_few_times_however_many_rounds_there_are(
    accumulate: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty texts of a hundred characters; `most` thousands may be made, lists of them included.

    Turns that wait for one another hand the result on, and do not make it anew.
    """
    monkeypatch.setattr(text_limit._Installed, "characters", 1000)
    monkeypatch.setattr(text_limit, "PER_PROMPT", most)
    text = ("Format", {"f_string": "{a:100}", "values.a": ["start", 0]})
    ends = end(accumulate, output_value=["text", 0])
    graph = {"start": start(num_iterations=20), "text": text, "end": ends, "show": SHOW}
    assert len(shown(graph)) == (20 if accumulate else 1)


def test_a_loop_ends_where_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt = Interrupt()

    def hand_on(cls: type[Noted], value: Any) -> io.NodeOutput:
        del cls
        calls.append(value)
        if value == 2:
            interrupt.set()
        return io.NodeOutput(value)

    monkeypatch.setattr(Noted, "execute", classmethod(hand_on))
    graph = counting(0, num_iterations=300)
    graph["noted"] = ("Noted", {"value": ["start", 0]})
    graph["end"][1]["output_value"] = ["noted", 0]
    executor = PromptExecutor(NodeRegistry(NODES), Sink(), interrupt)
    ran(graph, executor)
    assert executor.status_messages[-1][0] == "execution_interrupted"
    assert calls == [0, 1, 2]
    graph["start"][1]["mode.num_iterations"] = 2
    assert shown(graph, executor) == ["0", "1"]
