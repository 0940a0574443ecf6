"""Small parts: wire form, specs, listing, graph walking, progress, failures."""

from __future__ import annotations

import enum
import json
import threading
import time
from typing import Any

import pytest

from comfy_execution import events, progress
from comfy_execution.context import ExecutionContext, executing
from comfy_execution.failures import describe_failure, full_type_name, printable
from comfy_execution.graph import DynamicPrompt, ExecutionList, NodeInputError
from comfy_execution.graph_utils import is_link
from comfy_execution.node_info import node_info
from comfy_execution.registry import NodeRegistry, SpecTable, UnknownNodeError
from comfy_execution.spec import UNDECLARED, find_input, get_input_info, read_entry, spec_from_class
from comfy_execution.utils import get_executing_context
from comfy_execution.wire import NotJsonError, dump_json, require_json, strict_json
from tests.comfy_execution.support import CLASSES, Bench, Recorder, make, node
from tests.support.waiting import read_until

# --- wire -----------------------------------------------------------------------------------------


class Scalar:
    """A number of an array library."""

    shape = ()

    def item(self) -> float:
        return 1.5


def test_strict_json_replaces_what_json_lacks() -> None:
    value = {"a": (1, float("nan")), 2: {"b": float("inf")}, "n": Scalar(), "o": ValueError("x")}
    assert strict_json(value) == {"a": [1, None], "2": {"b": None}, "n": 1.5, "o": "x"}
    assert json.loads(dump_json(value)) == strict_json(value)


def test_text_of_an_enumeration_goes_out_as_its_value() -> None:
    class Mode(str, enum.Enum):
        FAST = "fast"

    assert strict_json({"options": [Mode.FAST], "nan": float("nan")})["options"] == ["fast"]


def test_required_json_names_the_place() -> None:
    assert require_json({"a": (1, "x", None, True)}, "ui") == {"a": [1, "x", None, True]}
    with pytest.raises(NotJsonError, match=r"ui\.a\[1\] is nan"):
        require_json({"a": [1, float("nan")]}, "ui")
    with pytest.raises(NotJsonError, match=r"ui\.a is a builtins\.object"):
        require_json({"a": object()}, "ui")


def test_custom_events_are_strict_and_go_to_all_when_addressed_to_nobody() -> None:
    event = events.CustomEvent("pack.news", {"x": float("nan")})
    assert event.payload() == {"x": None}
    assert event.broadcast
    assert not events.CustomEvent("pack.news", 1, "me").broadcast


# --- specs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "kind", "options"),
    [
        (("INT", {"min": 1}), "INT", {"min": 1}),
        (["INT"], "INT", {}),
        ("INT", "INT", {}),
        ((["a", "b"],), ["a", "b"], {}),
        (("INT", {"a": 1}, "more"), "INT", {"a": 1}),
        (("INT", None), "INT", {}),
        ((), None, {}),
    ],
)
def test_every_form_of_an_input_is_read(entry: Any, kind: Any, options: Any) -> None:
    info = read_entry(entry, "required")
    assert (info.type, info.options) == (kind, options)


def test_inputs_are_looked_up_in_open_ended_sections() -> None:
    class Open(dict):  # type: ignore[type-arg]
        def __contains__(self, key: object) -> bool:
            return True

        def __getitem__(self, key: str) -> Any:
            return (f"TYPE_{key}",)

    assert find_input({"optional": Open()}, "x").type == "TYPE_x"
    assert find_input({"optional": {}}, "x") is UNDECLARED


def test_a_class_that_looks_at_the_call_stack_recognises_the_graph_walk() -> None:
    import inspect

    class Suspicious:
        RETURN_TYPES = ("INT",)
        FUNCTION = "run"

        @classmethod
        def INPUT_TYPES(cls) -> dict[str, Any]:
            callers = [frame.function for frame in inspect.stack()[1:3]]
            found = all(name == "get_input_info" for name in callers)
            return {"optional": {"walked": ("INT", {"lazy": True})} if found else {}}

    spec = spec_from_class("S", Suspicious)
    assert spec.find("walked", {}) is UNDECLARED
    assert spec.link_info("walked", {}).options == {"lazy": True}


def test_the_public_lookup() -> None:
    kind = node("Kind", {"required": {"x": ("INT", {"min": 1})}})
    assert get_input_info(kind, "x") == ("INT", "required", {"min": 1})
    assert get_input_info(kind, "y") == (None, None, {})
    assert get_input_info(kind, "y", {"optional": {"y": ("A",)}})[1] == "optional"


def test_a_class_without_the_basics_is_refused_with_its_name() -> None:
    with pytest.raises(AttributeError, match="FUNCTION"):
        spec_from_class("X", type("NoFunction", (), {}))
    with pytest.raises(AttributeError, match="INPUT_TYPES"):
        spec_from_class("X", type("NoInputs", (), {"FUNCTION": "f"}))


def test_unknown_classes() -> None:
    registry = NodeRegistry(CLASSES)
    assert registry.get("Nope") is None
    with pytest.raises(UnknownNodeError, match="'Nope' does not exist"):
        SpecTable(registry)["Nope"]


def test_a_class_added_later_is_found() -> None:
    classes: dict[str, Any] = {}
    registry = NodeRegistry(classes)
    classes["Late"] = node("Late")
    assert registry.get("Late") is not None
    assert list(registry) == ["Late"]


def test_the_listing_of_a_classic_class() -> None:
    required = {"x": ("INT", {"default": float("inf"), "own": 1})}
    kind = node(
        "Kind", {"required": required, "hidden": {"me": "UNIQUE_ID"}},
        RETURN_TYPES=("IMAGE", ["a", "b"]), RETURN_NAMES="picture", OUTPUT_IS_LIST=(True,),
        DESCRIPTION="d", DEPRECATED=True, OUTPUT_TOOLTIPS=("t",), SEARCH_ALIASES=["s"],
    )  # fmt: skip
    info = node_info(spec_from_class("Kind", kind), "A Kind")
    assert info == {
        "input": {
            "required": {"x": ["INT", {"default": None, "own": 1}]},
            "hidden": {"me": "UNIQUE_ID"},
        },
        "input_order": {"required": ["x"], "hidden": ["me"]},
        "output": ["IMAGE", ["a", "b"]],
        "output_is_list": [True],
        "output_name": ["picture"],
        "output_tooltips": ["t"],
        "name": "Kind",
        "display_name": "A Kind",
        "description": "d",
        "python_module": "nodes",
        "category": "test",
        "output_node": False,
        "deprecated": True,
        "search_aliases": ["s"],
    }


# --- graph ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [(["1", 0], True), (["1", 1.0], True), (["1"], False), ([1, 0], False), (["1", "0"], False),
     (["1", True], False), (("1", 0), False), ("1", False), (None, False)],
)  # fmt: skip
def test_links(value: Any, expected: bool) -> None:
    assert is_link(value) is expected


def execution_list(prompt: dict[str, Any], known: tuple[str, ...] = ()) -> ExecutionList:
    specs = SpecTable(NodeRegistry(CLASSES))
    return ExecutionList(DynamicPrompt(prompt), specs, known.__contains__)


def order_of(pending: ExecutionList) -> list[str]:
    order = []
    while (node_id := pending.stage()) is not None:
        order.append(node_id)
        pending.complete()
    return order


def test_outputs_go_before_nodes_that_feed_outputs_and_those_before_others() -> None:
    prompt = {
        "far": make("Number", value=1),
        "mid": make("Add", a=["far", 0], b=1),
        "near": make("Add", a=["mid", 0], b=1),
        "end": make("Show", value=["near", 0]),
        "other": make("Number", value=2),
        "soon": make("Show", value=["other", 0]),
    }
    pending = execution_list(prompt)
    for name in ("end", "soon"):
        pending.add_node(name)
    assert order_of(pending) == ["other", "soon", "far", "mid", "near", "end"]


def test_known_results_and_what_they_need_are_not_added() -> None:
    prompt = {
        "1": make("Number", value=1),
        "2": make("Add", a=["1", 0], b=1),
        "3": make("Show", value=["2", 0]),
    }
    pending = execution_list(prompt, ("2",))
    pending.add_node("3")
    assert order_of(pending) == ["3"]


def test_a_node_waits_for_a_link_added_later_and_for_outside_blocks() -> None:
    prompt = {"1": make("Number", value=1), "2": make("Show", value=0, x=["1", 0])}
    pending = execution_list({**prompt, "2": make("Show", value=0)})
    pending.add_node("2")
    assert pending.stage() == "2"
    pending.add_strong_link("1", 0, "2")
    unblock = pending.add_external_block("2")
    pending.unstage()
    assert order_of(pending) == ["1"]
    assert pending.has_external_blocks
    unblock()
    assert order_of(pending) == ["2"]
    assert len(pending) == 0


def test_lazy_links_are_followed_on_demand_only() -> None:
    prompt = {
        "1": make("Number", value=1),
        "2": make("Switch", which=True, yes=["1", 0], no=5),
    }
    pending = execution_list(prompt)
    pending.add_node("2")
    assert "1" not in pending
    pending.make_input_strong_link("2", "yes")
    assert "1" in pending
    with pytest.raises(NodeInputError, match="not linked"):
        pending.make_input_strong_link("2", "no")
    with pytest.raises(NodeInputError, match="'maybe'"):
        pending.make_input_strong_link("2", "maybe")


def test_cycles_are_found_behind_nodes_that_only_wait_for_them() -> None:
    prompt = {
        "a": make("Add", a=["b", 0], b=1),
        "b": make("Add", a=["a", 0], b=1),
        "c": make("Show", value=["a", 0]),
    }
    pending = execution_list(prompt)
    pending.add_node("c")
    assert pending.stage() is None
    assert sorted(pending.find_cycle()) == ["a", "b"]


# --- progress and context -------------------------------------------------------------------------


def test_a_progress_bar_reports_for_its_node_and_shows_previews_both_ways() -> None:
    sink = Recorder()
    registry = progress.ProgressRegistry("p", DynamicPrompt({"1": {}}), sink, "me")
    progress.reset_progress_state(registry)
    registry.start_progress("1")
    with executing(ExecutionContext("p", "1")):
        progress.make_progress_hook()(3, 10, ("PNG", "image", None))
    assert sink.names() == ["progress_state", "progress_state", "preview", "progress", "preview"]
    assert sink.named("progress") == [{"value": 3, "max": 10, "prompt_id": "p", "node": "1"}]
    with_metadata, without = (e for e in sink.events if isinstance(e, events.Preview))
    assert with_metadata.payload()["display_node_id"] == "1"
    assert without.metadata is None
    assert all(event.client_id == "me" for event in sink.events)


def test_progress_from_a_thread_of_the_node_is_the_running_nodes() -> None:
    sink = Recorder()
    registry = progress.ProgressRegistry("p", DynamicPrompt({}), sink)
    progress.reset_progress_state(registry)
    registry.start_progress("7")
    thread = threading.Thread(target=progress.make_progress_hook(), args=(1, 2))
    thread.start()
    thread.join()
    assert sink.named("progress")[0]["node"] == "7"


def test_overlapping_async_nodes_report_each_for_itself() -> None:
    import asyncio

    async def run(self: Any, steps: int) -> tuple[int]:
        for step in range(steps):
            progress.make_progress_hook()(step + 1, steps)
            await asyncio.sleep(0)
        return (steps,)

    bench = Bench(classes={"Bar": node("Bar", {"required": {"steps": ("INT",)}}, run=run)})
    prompt = {f"b{i}": make("Bar", steps=i) for i in (2, 3)}
    prompt |= {f"s{i}": make("Show", value=[f"b{i}", 0]) for i in (2, 3)}
    bench.run(prompt)
    steps = [(data["node"], data["max"]) for data in bench.sink.named("progress")]
    assert sorted(steps) == [("b2", 2)] * 2 + [("b3", 3)] * 3


def test_many_nodes_are_reported_at_intervals_and_completely_at_the_end() -> None:
    bench = Bench()
    prompt = {"n0": make("Number", value=0)}
    prompt |= {f"n{i}": make("Add", a=[f"n{i - 1}", 0], b=1) for i in range(1, 600)}
    prompt["show"] = make("Show", value=["n599", 0])
    bench.run(prompt)
    states = bench.sink.named("progress_state")
    assert len(states) < 2 * 600
    assert len(states[-1]["nodes"]) == 601
    assert {entry["state"] for entry in states[-1]["nodes"].values()} == {"finished"}


def test_what_was_held_back_is_sent_though_the_running_node_reports_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "ENTRIES_PER_S", 50_000)
    sink = Recorder()
    registry = progress.ProgressRegistry("p", DynamicPrompt({}), sink)
    for number in range(400):
        registry.start_progress(str(number))
    assert read_until(lambda: len(sink.named("progress_state")[-1]["nodes"]), 400) == 400
    registry.start_progress("last")
    registry.flush()
    sent = len(sink.events)
    assert "last" in sink.named("progress_state")[-1]["nodes"]
    registry.close()
    time.sleep(0.02)
    assert len(sink.events) == sent


def test_node_code_can_ask_where_it_runs() -> None:
    seen: list[Any] = []

    def run(self: Any) -> tuple[int]:
        seen.append(get_executing_context())
        return (1,)

    bench = Bench(classes={"Where": node("Where", run=run)})
    bench.run({"1": make("Where"), "2": make("Show", value=["1", 0])})
    assert seen == [ExecutionContext("prompt-1", "1", 0)]
    assert get_executing_context() is None


# --- failures -------------------------------------------------------------------------------------


def test_names_and_values_in_errors() -> None:
    assert full_type_name(ValueError) == "ValueError"
    assert full_type_name(NotJsonError) == "comfy_execution.wire.NotJsonError"
    assert [printable(v) for v in (None, True, 1, 1.5, "x", float("nan"), (1,))] == [
        None, True, 1, 1.5, "x", "nan", "(1,)",
    ]  # fmt: skip
    assert printable("x" * 5000).endswith("(5000 chars)")


def test_a_value_whose_text_fails_does_not_hide_the_error() -> None:
    class Rude:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    failure = describe_failure("1", ValueError("real"), {"x": [Rude()]})
    assert failure.message == "real\n"
    assert "Rude" in failure.current_inputs["x"][0]
