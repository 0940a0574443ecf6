"""Nodes that put a graph in their place."""

from __future__ import annotations

from typing import Any

from comfy_execution.graph_utils import GraphBuilder

INT = ("INT", {"default": 0})


class Twice:
    """value + 2 * step, by a graph of two additions."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "expand"
    CATEGORY = "trial/expansion"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT, "step": INT}}

    def expand(self, value: int, step: int) -> dict[str, Any]:
        build = GraphBuilder()
        first = build.node("TrialAdd", a=value, b=step)
        second = build.node("TrialAdd", a=first.out(0), b=step)
        return {"result": (second.out(0),), "expand": build.finalize()}


class SumTo(Twice):
    """n + (n - 1) + ... + 1 + total, by expanding into itself."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"n": INT, "total": INT}}

    def expand(self, n: int, total: int) -> Any:
        if n == 0:
            return (total,)
        build = GraphBuilder()
        added = build.node("TrialAdd", a=n, b=total)
        again = build.node("TrialSumTo", n=n - 1, total=added.out(0))
        return {"result": (again.out(0),), "expand": build.finalize()}


class Mixed(Twice):
    """Over a list: even numbers are returned as they are, odd ones through a graph (times ten)."""

    RETURN_TYPES = ("INT", "STRING")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT}}

    def expand(self, value: int) -> Any:
        if value % 2 == 0:
            return (value, "plain")
        build = GraphBuilder()
        added = build.node("TrialAdd", a=9 * value, b=value)
        return {"result": (added.out(0), "graph"), "expand": build.finalize()}


class ListOfTwo(Twice):
    """A list output made of a graph's list output."""

    OUTPUT_IS_LIST = (True,)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"count": INT}}

    def expand(self, count: int) -> dict[str, Any]:
        build = GraphBuilder()
        numbers = build.node("TrialRange", count=count)
        return {"result": (numbers.out(0),), "expand": build.finalize()}


class Circle(Twice):
    """A graph whose nodes wait for each other."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT}}

    def expand(self, value: int) -> dict[str, Any]:
        build = GraphBuilder()
        first, second = build.node("TrialAdd", b=value), build.node("TrialAdd", b=value)
        first.set_input("a", second.out(0))
        second.set_input("a", first.out(0))
        return {"result": (first.out(0),), "expand": build.finalize()}


class SelfWaiting(Circle):
    """A graph that waits for the node it stands for."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT}, "hidden": {"own_id": "UNIQUE_ID"}}

    def expand(self, value: int, own_id: str = "") -> dict[str, Any]:
        build = GraphBuilder()
        added = build.node("TrialAdd", a=[own_id, 0], b=value)
        return {"result": (added.out(0),), "expand": build.finalize()}


class Unheard(Circle):
    """A graph with a class that does not exist."""

    def expand(self, value: int) -> dict[str, Any]:
        build = GraphBuilder()
        return {
            "result": (build.node("NoSuchClass", value=value).out(0),),
            "expand": build.finalize(),
        }


class Taken(Circle):
    """A graph that uses an id of the posted prompt."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT}, "hidden": {"own_id": "UNIQUE_ID"}}

    def expand(self, value: int, own_id: str = "") -> dict[str, Any]:
        graph = {own_id: {"class_type": "TrialAdd", "inputs": {"a": value, "b": 1}}}
        return {"result": ([own_id, 0],), "expand": graph}


class FailInside(Circle):
    """A graph whose node raises."""

    def expand(self, value: int) -> dict[str, Any]:
        build = GraphBuilder()
        failing = build.node("TrialRaise", value=value, kind="ValueError")
        return {"result": (failing.out(0),), "expand": build.finalize()}


class Empty(Circle):
    """An empty graph beside a plain value."""

    def expand(self, value: int) -> dict[str, Any]:
        return {"result": (value + 1,), "expand": {}}


class ShowInside(Circle):
    """A graph with an output node that nothing is linked to."""

    def expand(self, value: int) -> dict[str, Any]:
        build = GraphBuilder()
        added = build.node("TrialAdd", a=value, b=value)
        build.node("TrialShow", value=added.out(0))
        return {"result": (added.out(0),), "expand": build.finalize()}


class SampleInside:
    """Samples the same latent once for each of `rounds`, half as strongly each time."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "expand"
    CATEGORY = "trial/expansion"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL",),
                "positive": ("CONDITIONING",),
                "negative": ("CONDITIONING",),
                "latent": ("LATENT",),
                "rounds": ("INT", {"default": 2, "min": 1, "max": 9}),
            }
        }

    def expand(
        self, model: Any, positive: Any, negative: Any, latent: Any, rounds: int
    ) -> dict[str, Any]:
        build = GraphBuilder()
        current: Any = latent
        for turn in range(rounds):
            sampled = build.node(
                "KSampler", model=model, positive=positive, negative=negative, seed=turn,
                latent_image=current, steps=2, cfg=4.0, sampler_name="euler", scheduler="normal",
                denoise=0.5**turn,
            )  # fmt: skip
            current = sampled.out(0)
        return {"result": (current,), "expand": build.finalize()}


NODES = (
    Twice, SumTo, Mixed, ListOfTwo, Circle, SelfWaiting, Unheard, Taken, FailInside, Empty,
    ShowInside, SampleInside,
)  # fmt: skip
