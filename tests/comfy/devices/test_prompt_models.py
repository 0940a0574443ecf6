"""Which models a prompt references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from comfy.devices.prompt_models import PromptModelTracker
from comfy_execution.graph_utils import GraphBuilder
from tests.comfy_execution.support import Bench, NodeBase, make


class Module:
    """Stands for a base module."""


class Patcher:
    """The part of a model patcher that the tracker looks at."""

    def __init__(self, *additional: Patcher) -> None:
        self.model, self.additional = Module(), additional

    def model_patches_to(self, device: object) -> None: ...

    def get_nested_additional_models(self) -> list[Patcher]:
        return list(self.additional)


class Holder:
    """Stands for a CLIP or VAE, which carries its patcher."""

    def __init__(self) -> None:
        self.patcher = Patcher()


def test_models_on_links_are_known_while_the_prompt_runs() -> None:
    tracker, extra = PromptModelTracker(), Patcher()
    model, holder = Patcher(extra), Holder()
    with tracker.running():
        for value in (model, {"vae": holder}, "text", 3, None):
            tracker.add(value)
        assert all(tracker.references(each.model) for each in (model, extra, holder.patcher))
        assert not tracker.references(Patcher().model)
    assert tracker.models() == []


def test_the_tracker_keeps_no_model_alive() -> None:
    tracker = PromptModelTracker()
    tracker.add([Patcher()])
    assert tracker.models() == []


class SimplePatcher:
    """A pack's patcher that answers only what it is asked by the planner."""

    def __init__(self) -> None:
        self.model = Module()

    def model_patches_to(self, device: object) -> None: ...


class Control:
    """Stands for a ControlNet in a conditioning's options."""

    def __init__(self) -> None:
        self.wrapped = Patcher()

    def get_control(self) -> None: ...

    def get_models(self) -> list[Patcher]:
        return [self.wrapped]


class Guider:
    """Stands for a guider, which carries the patcher it samples with."""

    def __init__(self) -> None:
        self.model_patcher = SimplePatcher()


def test_models_inside_conditioning_guiders_and_simple_patchers_are_known() -> None:
    tracker, control, guider, simple = PromptModelTracker(), Control(), Guider(), SimplePatcher()
    empty = SimplePatcher()
    del empty.model
    for value in ([["tensor", {"control": control}]], guider, [simple], empty, [[0] * 5000] * 3):
        tracker.add(value)
    wanted = (control.wrapped.model, guider.model_patcher.model, simple.model)
    assert all(tracker.references(model) for model in wanted)
    assert len(tracker.models()) == 3


class Load(NodeBase):
    """Gives a patcher of its own per name, as a loader does."""

    made: ClassVar[dict[str, Patcher]] = {}

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"name": ("STRING",)}}

    def run(self, name: str) -> tuple[Patcher]:
        return (self.made.setdefault(name, Patcher()),)


class Use(NodeBase):
    """Output node that notes which models the running prompt references."""

    OUTPUT_NODE = True
    seen: ClassVar[list[set[str]]] = []

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("*",), "turn": ("INT",)}}

    def run(self, model: Any, turn: int) -> tuple[Any]:
        known = Load.made.items()
        self.seen.append({name for name, made in known if TRACKER.references(made.model)})
        return (model,)


class UseAnother(NodeBase):
    """Puts a graph in its place that loads one more model and uses it."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("*",), "depth": ("INT",), "turn": ("INT",)}}

    def run(self, model: Any, depth: int, turn: int) -> dict[str, Any]:
        build = GraphBuilder()
        loaded = build.node("Load", name=f"inner {depth}").out(0)
        if depth > 0:
            last = build.node("UseAnother", model=loaded, depth=depth - 1, turn=turn)
        else:
            last = build.node("Use", model=loaded, turn=turn)
        return {"result": (last.out(0),), "expand": build.finalize()}


TRACKER = PromptModelTracker()


def test_models_of_cached_links_and_of_expanded_graphs_are_known_and_others_are_not() -> None:
    def see(inputs: Mapping[str, list[Any]]) -> None:
        for values in inputs.values():
            for value in values:
                TRACKER.add(value)

    Load.made.clear()
    Use.seen.clear()
    classes = {kind.__name__: kind for kind in (Load, Use, UseAnother)}
    bench = Bench(classes=classes, see_inputs=see, run_context=TRACKER.running)
    outer = {"load": make("Load", name="outer"), "other": make("Load", name="unused")}
    nested = {
        **outer,
        "expand": make("UseAnother", model=["load", 0], depth=2, turn=1),
        "show": make("Use", model=["expand", 0], turn=1),
    }
    bench.run(nested)
    inner = {"inner 0", "inner 1", "inner 2"}
    assert Use.seen == [{"outer", *inner}] * 2
    Use.seen.clear()
    bench.run({**outer, "show": make("Use", model=["load", 0], turn=2)})  # the loader is cached
    bench.run({**outer, "show": make("Use", model=["load", 0], turn=3)})
    assert Use.seen == [{"outer"}] * 2
    assert TRACKER.models() == []
