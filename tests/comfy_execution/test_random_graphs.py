"""Random graphs against a ten-line recursive evaluator, under every cache policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comfy_execution.graph_utils import GraphBuilder, is_link
from tests.comfy_execution.support import POLICIES, Bench, NodeBase, Prompt, all_caches, make

ENDS = ("execution_success", "execution_error", "execution_interrupted")

runs: dict[str, int] = {}
"""Node id -> how often it ran in the current prompt."""

trouble: dict[int, Callable[[], None]] = {}
"""Number of a call in the current prompt -> what goes wrong in it."""


class Counting(NodeBase):
    """Notes under its own id that it ran."""

    operands = ("a", "b")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {name: ("INT", {"lazy": cls.is_lazy(name)}) for name in cls.operands},
            "hidden": {"me": "UNIQUE_ID"},
        }

    @classmethod
    def is_lazy(cls, name: str) -> bool:
        return False

    def run(self, me: str, **values: Any) -> Any:
        runs[me] = runs.get(me, 0) + 1
        trouble.get(sum(runs.values()), lambda: None)()
        return self.compute(**values)

    def compute(self, **values: Any) -> Any:
        raise AssertionError("overridden")


class Leaf(Counting):
    operands = ("a",)

    def compute(self, a: int) -> Any:
        return (a,)


class Plus(Counting):
    def compute(self, a: int, b: int) -> Any:
        return (a + b,)


class LaterPlus(Plus):
    """The same, async."""

    async def run(self, me: str, **values: Any) -> Any:  # type: ignore[override]
        import asyncio

        await asyncio.sleep(0)
        return super().run(me, **values)


class IfOdd(Counting):
    """b if a is odd, else c; only the one that is needed."""

    operands = ("a", "b", "c")

    @classmethod
    def is_lazy(cls, name: str) -> bool:
        return name != "a"

    def check_lazy_status(self, a: int, b: Any, c: Any, me: str) -> list[str]:
        return [name for name, value in ((("b", b) if a % 2 else ("c", c)),) if value is None]

    def compute(self, a: int, b: Any = None, c: Any = None) -> Any:
        return (b if a % 2 else c,)


class Grown(Counting):
    """a + 2 b, by a graph."""

    def compute(self, a: int, b: int) -> Any:
        build = GraphBuilder()
        first = build.node("Plus", a=a, b=b)
        second = build.node("LaterPlus", a=first.out(0), b=b)
        return {"result": (second.out(0),), "expand": build.finalize()}


CLASSES = {kind.__name__: kind for kind in (Leaf, Plus, LaterPlus, IfOdd, Grown)}


def evaluate(prompt: Prompt, value: Any) -> int:
    """The oracle."""
    if not is_link(value):
        return int(value)
    node = prompt[value[0]]
    a, b, c = (node["inputs"].get(name, 0) for name in "abc")
    first = evaluate(prompt, a)
    if node["class_type"] == "IfOdd":
        return evaluate(prompt, b if first % 2 else c)
    if node["class_type"] == "Leaf":
        return first
    return first + evaluate(prompt, b) * (2 if node["class_type"] == "Grown" else 1)


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    count = draw(st.integers(1, 9))
    prompt: Prompt = {}
    for index in range(count):
        kind = draw(st.sampled_from(sorted(CLASSES)))
        inputs: dict[str, Any] = {}
        for name in CLASSES[kind].operands:
            source = draw(st.integers(-1, index - 1))
            inputs[name] = draw(st.integers(0, 3)) if source < 0 else [f"n{source}", 0]
        prompt[f"n{index}"] = make(kind, **inputs)
    for shown in draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True)):
        prompt[f"show{shown}"] = make("Show", value=[f"n{shown}", 0])
    return prompt


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(prompts(), min_size=1, max_size=6), st.sampled_from(POLICIES))
def test_every_policy_gives_the_oracles_values_and_runs_no_node_twice(
    series: list[Prompt], policy: str
) -> None:
    bench = Bench(all_caches()[policy], CLASSES)
    for prompt in [*series, series[0]]:
        runs.clear()
        result = bench.run(prompt)
        assert bench.executor.success, bench.executor.status_messages[-1]
        assert bench.values(result) == expected(prompt)
        assert all(times == 1 for times in runs.values()), runs


def expected(prompt: Prompt) -> dict[str, list[int]]:
    """What the nodes that show something show."""
    return {
        name: [evaluate(prompt, node["inputs"]["value"])]
        for name, node in prompt.items()
        if node["class_type"] == "Show"
    }


def fail() -> None:
    raise ValueError("trouble")


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(prompts(), st.integers(1, 12), st.sampled_from(["fails", "stopped", "told"])),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(POLICIES),
)
def test_what_failed_or_was_stopped_leaves_only_true_results(
    series: list[tuple[Prompt, int, str]], policy: str
) -> None:
    bench = Bench(all_caches()[policy], CLASSES)

    def stop() -> None:
        raise bench.flag.exception

    kinds = {"fails": fail, "stopped": stop, "told": bench.flag.set}
    for prompt, call, kind in series:
        runs.clear()
        trouble[call] = kinds[kind]
        shown = bench.values(bench.run(prompt))
        trouble.clear()
        bench.flag.clear()
        right = expected(prompt)
        assert shown.items() <= right.items()
        assert not bench.executor.success or shown == right
        assert all(times == 1 for times in runs.values()), runs
        ends = [name for name, _ in bench.executor.status_messages if name in ENDS]
        assert len(ends) == 1
        assert bench.values(bench.run(prompt)) == right  # as if nothing had happened


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(prompts())
def test_the_classic_cache_runs_nothing_in_an_unchanged_prompt(prompt: Prompt) -> None:
    bench = Bench(classes=CLASSES)
    bench.run(prompt)
    runs.clear()
    bench.run(prompt)
    assert runs == {}
