"""Cache policies by themselves, and when the run lets go of results."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from comfy_execution.caching import (
    CacheType,
    ClassicCache,
    LRUCache,
    NullCache,
    Ownership,
    RAMPressureCache,
    make_cache,
)
from comfy_execution.graph import DynamicPrompt
from comfy_execution.instances import ObjectCache
from comfy_execution.memory import estimate_bytes, free_memory_bytes
from comfy_execution.registry import NodeRegistry, SpecTable
from comfy_execution.signatures import Parts, Signatures, encode, explain
from tests.comfy_execution.support import CLASSES, Bench, entry_of, make, node

POSTED = Ownership("1", False)


def test_the_lru_cache_drops_what_was_used_longest_ago() -> None:
    cache = LRUCache(2)
    for name in "ab":
        cache.put(name, entry_of(name), POSTED)
    cache.get("a")
    cache.put("c", entry_of("c"), POSTED)
    assert [cache.get(name) is not None for name in "abc"] == [True, False, True]
    with pytest.raises(ValueError, match="capacity 0"):
        LRUCache(0)


def test_the_classic_cache_keeps_what_the_next_prompt_can_use() -> None:
    cache = ClassicCache()
    cache.begin(["same", "old"], ["1", "2"], ["1", "2", "3"])
    cache.put("same", entry_of(1), Ownership("1", False))
    cache.put("old", entry_of(2), Ownership("2", False))
    cache.put("aside", entry_of(3), Ownership("3", False))
    cache.put("inner", entry_of(4), Ownership("2", True))
    cache.end(["2"])
    cache.begin(["same", "new"], ["1", "2"], ["1", "2", "3"])
    kept = {name for name in ("same", "old", "aside", "inner") if cache.get(name)}
    assert kept == {"same", "aside", "inner"}
    cache.end([])
    cache.begin([], [], ["9"])
    assert len(cache) == 0


def test_results_of_a_graph_go_when_the_next_expansion_does_not_use_them() -> None:
    cache = ClassicCache()
    cache.begin([], [], [])
    cache.put("used", entry_of(1), Ownership("2", True))
    cache.put("unused", entry_of(2), Ownership("2", True))
    cache.end(["2"])
    cache.begin(["2x"], ["2"], ["2"])
    cache.get("used")
    cache.end(["2"])
    assert cache.get("used") is not None
    assert cache.get("unused") is None


def test_under_pressure_the_oldest_and_biggest_results_go() -> None:
    free = 100
    cache = RAMPressureCache(50, lambda: free, lambda entry: entry.outputs[0][0])
    cache.begin([], [], [])
    cache.put("old small", entry_of(5), POSTED)
    cache.put("old big", entry_of(30), POSTED)
    cache.begin([], [], [])
    cache.put("new", entry_of(100), POSTED)
    free = 25
    assert cache.relieve() == 1
    assert cache.get("old big") is None
    free = 0
    assert cache.relieve() == 2


def test_policies_are_made_by_name() -> None:
    assert isinstance(make_cache("classic"), ClassicCache)
    assert isinstance(make_cache(CacheType.LRU, lru_size=3), LRUCache)
    assert isinstance(make_cache("none"), NullCache)
    pressure = make_cache("ram_pressure", free_bytes=lambda: 0)
    assert isinstance(pressure, RAMPressureCache)
    with pytest.raises(KeyError):
        make_cache("forever")


def test_an_object_is_made_anew_when_its_class_was_replaced() -> None:
    objects = ObjectCache()
    objects.put("1", "A", int, "instance", "1")
    assert objects.get("1", "A", int) == "instance"
    assert objects.get("1", "A", float) is None
    objects.keep_only(["2"])
    assert objects.get("1", "A", int) is None


def test_sizes_count_arrays_and_shared_things_once() -> None:
    class Array:
        nbytes = 1000

    array = Array()
    assert estimate_bytes([[array, array], [{"samples": array}], ["text"]]) == 1004


def test_free_memory_is_measured() -> None:
    assert free_memory_bytes() > 0


# --- signatures -----------------------------------------------------------------------------------


def signature(prompt: dict[str, Any], node_id: str, changed: dict[str, Any] | None = None) -> str:
    specs = SpecTable(NodeRegistry(CLASSES))
    return Signatures(DynamicPrompt(prompt), specs, changed or {}).get(node_id)


def test_signatures_follow_content_not_names() -> None:
    one = {"a": make("Number", value=1), "b": make("Add", a=["a", 0], b=2)}
    two = {"x": make("Number", value=1), "y": make("Add", b=2, a=["x", 0])}
    assert signature(one, "b") == signature(two, "y")


@pytest.mark.parametrize(
    "other",
    [
        {"a": make("Number", value=2), "b": make("Add", a=["a", 0], b=2)},
        {"a": make("Number", value=1), "b": make("Add", a=["a", 1], b=2)},
        {"a": make("Number", value=1), "b": make("Add", a=["a", 0], b="2")},
        {"a": make("Number", value=1), "b": make("Add", a=["a", 0])},
        {"a": make("Number", value=1), "b": make("Switch", a=["a", 0], b=2)},
    ],
)
def test_signatures_differ_with_any_part(other: dict[str, Any]) -> None:
    one = {"a": make("Number", value=1), "b": make("Add", a=["a", 0], b=2)}
    assert signature(one, "b") != signature(other, "b")


def test_a_long_chain_and_a_cycle_are_signed_without_recursion() -> None:
    chain = {"n0": make("Number", value=0)}
    chain |= {f"n{i}": make("Add", a=[f"n{i - 1}", 0], b=1) for i in range(1, 5000)}
    assert signature(chain, "n4999") != signature(chain, "n4998")
    circle = {"a": make("Add", a=["b", 0], b=1), "b": make("Add", a=["a", 0], b=1)}
    assert signature(circle, "a")


def test_constants_are_encoded_by_value_and_type() -> None:
    assert encode({"b": [1, 2.0], "a": None}) == encode({"a": None, "b": [1, 2.0]})
    assert len({encode(value) for value in (1, 1.0, True, "1", [1], None)}) == 6
    assert encode(float("nan")) != encode(float("nan"))
    thing = object()
    assert encode(thing) != encode(thing)


def test_reasons_name_the_input() -> None:
    before = Parts("A", "", {"x": "1", "y": "2"})
    assert explain(None, before) == "not run before"
    assert explain(before, Parts("A", "", {"x": "1", "y": "3"})) == "changed input: y"
    assert explain(before, Parts("A", "", {"x": "1"})) == "changed input: y"
    assert "IS_CHANGED" in explain(before, Parts("A", "z", before.inputs))
    assert explain(before, before) == "its result was not kept"


# --- letting go within a prompt -------------------------------------------------------------------


class Big:
    """Stands for a tensor."""


def test_without_a_cache_a_result_goes_when_its_last_user_is_done() -> None:
    alive: list[weakref.ref[Big]] = []
    seen: list[int] = []

    def make_big(self: Any, after: Any = None) -> tuple[Big]:
        big = Big()
        alive.append(weakref.ref(big))
        return (big,)

    def use(self: Any, big: Any) -> tuple[int]:
        gc.collect()
        seen.append(sum(ref() is not None for ref in alive))
        return (1,)

    classes = {
        "Make": node("Make", {"optional": {"after": ("*",)}}, run=make_big),
        "Use": node("Use", {"required": {"big": ("*",)}}, run=use),
    }
    prompt: dict[str, Any] = {}
    for i in range(6):
        after = {"after": [f"use{i - 1}", 0]} if i else {}
        prompt[f"big{i}"] = make("Make", **after)
        prompt[f"use{i}"] = make("Use", big=[f"big{i}", 0])
    prompt["show"] = make("Show", value=["use5", 0])
    bench = Bench(NullCache(), classes)
    bench.run(prompt)
    assert bench.executor.success
    assert seen == [1] * 6


def test_a_lazy_input_that_is_never_asked_for_holds_nothing() -> None:
    alive: list[weakref.ref[Big]] = []
    seen: list[bool] = []

    def make_big(self: Any) -> tuple[Big]:
        alive.append(weakref.ref(big := Big()))
        return (big,)

    def look(self: Any, value: Any) -> tuple[int]:
        gc.collect()
        seen.append(alive[0]() is not None)
        return (value,)

    classes = {
        "Make": node("Make", run=make_big),
        "Use": node("Use", {"required": {"big": ("*",)}}, run=lambda self, big: (3,)),
        "Look": node("Look", {"required": {"value": ("*",)}}, run=look),
    }
    prompt = {
        "big": make("Make"),
        "used": make("Use", big=["big", 0]),
        "lazy": make("Use", big=["big", 0]),
        "switch": make("Switch", which=True, yes=["used", 0], no=["lazy", 0]),
        "look": make("Look", value=["switch", 0]),
        "show": make("Show", value=["look", 0]),
    }
    bench = Bench(NullCache(), classes)
    assert bench.values(bench.run(prompt)) == {"show": [3]}
    assert seen == [False]
