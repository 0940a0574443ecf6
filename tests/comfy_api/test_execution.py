"""Schema nodes run by the real executor."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from comfy_api.latest import ComfyAPI, ComfyAPISync, io, ui
from comfy_execution.events import Event
from comfy_execution.executor import PromptExecutor
from comfy_execution.graph_utils import ExecutionBlocker, GraphBuilder
from comfy_execution.node_info import node_info
from comfy_execution.registry import NodeRegistry
from comfy_execution.spec import spec_from_class

calls: list[Any] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


class Sink:
    client_id: str | None = None
    last_node_id: str | None = None

    def __init__(self) -> None:
        self.events: list[Event] = []

    def publish(self, event: Event) -> None:
        self.events.append(event)


class Ran:
    """One prompt and what came of it."""

    def __init__(self, prompt: dict[str, Any], executor: PromptExecutor | None = None) -> None:
        self.sink = Sink()
        self.executor = executor or PromptExecutor(NodeRegistry(NODES), self.sink)
        outputs = [name for name, node in prompt.items() if NODES[node["class_type"]].OUTPUT_NODE]
        self.executor.execute(prompt, "p", {"client_id": "c", "extra_pnginfo": {"w": 1}}, outputs)
        self.shown = self.executor.history_result["outputs"]

    def texts(self, node_id: str) -> list[str]:
        assert self.executor.success, self.executor.status_messages[-1]
        return list(self.shown[node_id]["text"])

    def error(self) -> dict[str, Any]:
        name, data = self.executor.status_messages[-1]
        assert name == "execution_error"
        return data


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def show(link: list[Any]) -> dict[str, Any]:
    return node("Show", value=link)


class Show(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema("Show", inputs=[io.AnyType.Input("value")], is_output_node=True)

    @classmethod
    def execute(cls, value: Any) -> io.NodeOutput:
        return io.NodeOutput(ui=ui.PreviewText(repr(value)))


class Hiding(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        hidden = [io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo]
        return io.Schema("Hiding", outputs=[io.AnyType.Output()], hidden=hidden)

    @classmethod
    def execute(cls) -> io.NodeOutput:
        hidden = cls.hidden
        return io.NodeOutput([hidden.unique_id, sorted(hidden.prompt), hidden.extra_pnginfo])


class Dynamic(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        template = io.Autogrow.TemplatePrefix(io.AnyType.Input("v"), "v", min=1, max=9)
        options = [
            io.DynamicCombo.Option("one", [io.Int.Input("a")]),
            io.DynamicCombo.Option("two", [io.Int.Input("b")]),
        ]
        return io.Schema(
            "Dynamic",
            inputs=[
                io.Autogrow.Input("grown", template),
                io.DynamicCombo.Input("mode", options),
                io.DynamicSlot.Input(io.Int.Input("slot"), [io.Int.Input("extra")]),
            ],
            outputs=[io.AnyType.Output()],
        )

    @classmethod
    def execute(
        cls, grown: dict[str, Any], mode: dict[str, Any], slot: dict[str, Any] | None = None
    ) -> io.NodeOutput:
        return io.NodeOutput([grown, mode, slot])


class Lazy(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        template = io.MatchType.Template("t")
        return io.Schema(
            "Lazy",
            inputs=[
                io.Boolean.Input("first"),
                io.MatchType.Input("a", template, lazy=True, optional=True),
                io.MatchType.Input("b", template, lazy=True, optional=True),
            ],
            outputs=[io.MatchType.Output(template)],
        )

    @classmethod
    def check_lazy_status(cls, first: bool, a: Any = None, b: Any = None) -> list[str]:
        name, value = ("a", a) if first else ("b", b)
        return [name] if value is None else []

    @classmethod
    def execute(cls, first: bool, a: Any = None, b: Any = None) -> io.NodeOutput:
        return io.NodeOutput(a if first else b)


class LazyByDefault(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        template = io.Autogrow.TemplatePrefix(io.AnyType.Input("v", lazy=True), "v")
        return io.Schema(
            "LazyByDefault",
            inputs=[io.AnyType.Input("a", lazy=True), io.Autogrow.Input("more", template)],
            outputs=[io.AnyType.Output()],
        )

    @classmethod
    def execute(cls, a: Any, more: dict[str, Any]) -> io.NodeOutput:
        return io.NodeOutput([a, more])


class Counted(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema("Counted", inputs=[io.Int.Input("n")], outputs=[io.Int.Output()])

    @classmethod
    def execute(cls, n: int) -> tuple[int]:
        calls.append(n)
        return (n,)


class Fresh(Counted):
    @classmethod
    def fingerprint_inputs(cls, n: int) -> float:
        return float("nan")


class FreshStatic(Fresh):
    @staticmethod
    def fingerprint_inputs(n: int) -> float:  # type: ignore[override]
        return float("nan")


class Waiting(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Int.Input("n"), io.String.Input("sort", default="async")]
        hidden = [io.Hidden.unique_id]
        return io.Schema("Waiting", inputs=inputs, outputs=[io.Int.Output()], hidden=hidden)

    @classmethod
    async def execute(cls, n: int, sort: str = "async") -> io.NodeOutput:
        calls.append(f"start {cls.hidden.unique_id}")
        await asyncio.sleep(0.01)
        if sort == "async":
            await ComfyAPI().execution.set_progress(n, 10)
        else:
            ComfyAPISync().execution.set_progress(n, 10)
        calls.append(f"end {cls.hidden.unique_id}")
        return io.NodeOutput(n)


class Expanding(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            "Expanding", inputs=[io.Int.Input("n")], outputs=[io.Int.Output()], enable_expand=True
        )

    @classmethod
    def execute(cls, n: int) -> io.NodeOutput:
        graph = GraphBuilder()
        made = graph.node("Counted", n=n + 1)
        return io.NodeOutput(made.out(0), expand=graph.finalize())


class Blocking(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.String.Input("how")]
        return io.Schema("Blocking", inputs=inputs, outputs=[io.Int.Output(), io.Int.Output()])

    @classmethod
    def execute(cls, how: str) -> Any:
        if how == "silent":
            return ExecutionBlocker(None)
        return io.NodeOutput(block_execution=how)


class Lists(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        outputs = [io.Int.Output(is_output_list=True)]
        return io.Schema("Lists", inputs=[io.Int.Input("n")], outputs=outputs, is_input_list=True)

    @classmethod
    def execute(cls, n: list[int]) -> io.NodeOutput:
        return io.NodeOutput([*range(n[0])])


class Everything(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema("Everything", outputs=[io.AnyType.Output()], accept_all_inputs=True)

    @classmethod
    def execute(cls, **kwargs: Any) -> io.NodeOutput:
        return io.NodeOutput(kwargs)


class Stateful(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema("Stateful", outputs=[io.Int.Output()])

    @classmethod
    def execute(cls) -> io.NodeOutput:
        cls.count = 1  # type: ignore[attr-defined]
        return io.NodeOutput(1)


class Borrowing(Counted):
    """A classic node that uses a schema node's helpers."""

    FUNCTION = "go"
    RETURN_TYPES = ("INT",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # type: ignore[override]
        return {"required": {"number": ("INT", {})}}

    def go(self, number: int) -> Any:
        return (self.execute(number)[0] * 2,)


NODES: dict[str, Any] = {
    made.__name__: made
    for made in (
        Show, Hiding, Dynamic, Lazy, LazyByDefault, Counted, Fresh, FreshStatic, Waiting,
        Expanding, Blocking, Lists, Everything, Stateful, Borrowing,
    )
}  # fmt: skip


def test_hidden_values_are_those_of_the_execution() -> None:
    ran = Ran({"1": node("Hiding"), "2": show(["1", 0])})
    assert ran.texts("2") == ["['1', ['1', '2'], {'w': 1}]"]
    assert Hiding.hidden.unique_id is None


def test_dotted_inputs_arrive_nested() -> None:
    inputs = {"grown.v0": ["0", 0], "grown.v1": 5, "mode": "two", "mode.b": 2}
    ran = Ran({"0": node("Counted", n=4), "1": node("Dynamic", **inputs), "2": show(["1", 0])})
    assert ran.texts("2") == ["[{'v0': 4, 'v1': 5}, {'mode': 'two', 'b': 2}, None]"]
    inputs = {"grown.v0": 1, "mode": "one", "mode.a": 1, "slot": ["0", 0], "slot.extra": 3}
    ran = Ran({"0": node("Counted", n=4), "1": node("Dynamic", **inputs), "2": show(["1", 0])})
    assert ran.texts("2") == ["[{'v0': 1}, {'mode': 'one', 'a': 1}, {'slot': 4, 'extra': 3}]"]


def test_a_node_runs_over_lists_with_nested_inputs() -> None:
    inputs = {"grown.v0": ["0", 0], "mode": "one", "mode.a": 1}
    ran = Ran({"0": node("Lists", n=2), "1": node("Dynamic", **inputs), "2": show(["1", 0])})
    assert ran.texts("2") == [
        "[{'v0': 0}, {'mode': 'one', 'a': 1}, None]",
        "[{'v0': 1}, {'mode': 'one', 'a': 1}, None]",
    ]


@pytest.mark.parametrize(("first", "expected"), [(True, 1), (False, 2)])
def test_only_the_lazy_input_that_is_wanted_is_evaluated(first: bool, expected: int) -> None:
    ran = Ran(
        {
            "1": node("Counted", n=1),
            "2": node("Counted", n=2),
            "3": node("Lazy", first=first, a=["1", 0], b=["2", 0]),
            "4": show(["3", 0]),
        }
    )
    assert ran.texts("4") == [str(expected)]
    assert calls == [expected]


def test_lazy_inputs_are_evaluated_where_the_node_does_not_choose() -> None:
    ran = Ran(
        {
            "1": node("Counted", n=1),
            "2": node("Counted", n=2),
            "3": node("LazyByDefault", a=["1", 0], **{"more.v0": ["2", 0]}),
            "4": show(["3", 0]),
        }
    )
    assert ran.texts("4") == ["[1, {'v0': 2}]"]


@pytest.mark.parametrize("kind", ["Fresh", "FreshStatic"])
def test_a_node_runs_again_when_its_fingerprint_says_so(kind: str) -> None:
    prompt = {"1": node("Counted", n=1), "2": node(kind, n=2), "3": show(["1", 0]),
              "4": show(["2", 0])}  # fmt: skip
    first = Ran(prompt)
    Ran(prompt, first.executor)
    assert sorted(calls) == [1, 2, 2]


def test_async_nodes_overlap_and_each_reports_for_itself() -> None:
    ran = Ran(
        {
            "1": node("Waiting", n=1),
            "2": node("Waiting", n=2, sort="plain"),
            "3": show(["1", 0]),
            "4": show(["2", 0]),
        }
    )
    assert (ran.texts("3"), ran.texts("4")) == (["1"], ["2"])
    assert {calls[0], calls[1]} == {"start 1", "start 2"}
    steps = [event.payload() for event in ran.sink.events if event.name == "progress"]
    assert sorted((step["node"], step["value"]) for step in steps) == [("1", 1), ("2", 2)]


def test_a_node_is_replaced_by_the_graph_it_returns() -> None:
    ran = Ran({"1": node("Expanding", n=1), "2": show(["1", 0])})
    assert ran.texts("2") == ["2"]
    assert calls == [2]


def test_a_blocker_silences_what_lies_downstream() -> None:
    for how in ("silent", ""):
        ran = Ran({"1": node("Blocking", how=how), "2": show(["1", 1])})
        assert ran.executor.success
        assert ran.shown == {}
        assert not [event for event in ran.sink.events if event.name == "execution_error"]


def test_a_blocker_with_a_text_is_shown_where_it_stops() -> None:
    ran = Ran({"1": node("Blocking", how="no more"), "2": show(["1", 0])})
    [error] = [event.payload() for event in ran.sink.events if event.name == "execution_error"]
    assert error["node_id"] == "2"
    assert "no more" in error["exception_message"]


def test_undeclared_inputs_arrive_where_the_schema_accepts_all() -> None:
    ran = Ran({"1": node("Everything", a=1, b="x"), "2": show(["1", 0])})
    assert ran.texts("2") == ["{'a': 1, 'b': 'x'}"]
    ran = Ran({"1": node("Counted", n=1, stray=2), "2": show(["1", 0])})
    assert ran.texts("2") == ["1"]


def test_state_on_the_class_is_an_error_that_says_what_to_do() -> None:
    error = Ran({"1": node("Stateful"), "2": show(["1", 0])}).error()
    assert error["node_id"] == "1"
    assert "cannot set 'count' on Stateful while it executes" in error["exception_message"]
    assert not hasattr(Stateful, "count")


def test_a_classic_node_may_derive_from_a_schema_node() -> None:
    ran = Ran({"1": node("Borrowing", number=4), "2": show(["1", 0])})
    assert ran.texts("2") == ["8"]
    info = node_info(spec_from_class("Borrowing", Borrowing))
    assert info["input"] == {"required": {"number": ["INT", {}]}}
    assert info["category"] == "sd"
