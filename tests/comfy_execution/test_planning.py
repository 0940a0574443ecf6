"""The dry run: it says what a real run does, and changes nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from comfy_execution.planning import Plan, plan_prompt
from tests.comfy_execution.support import Bench, Number, make

PROMPT = {
    "1": make("Number", value=3),
    "2": make("Add", a=["1", 0], b=4),
    "3": make("Show", value=["2", 0]),
}


def plan(bench: Bench, prompt: dict[str, Any], outputs: list[str]) -> Plan:
    cache = bench.executor.caches.outputs
    return asyncio.run(plan_prompt(prompt, outputs, bench.registry, cache))


def test_before_and_after_a_run() -> None:
    bench = Bench()
    assert plan(bench, PROMPT, ["3"]) == Plan([], ["1", "2", "3"], [])
    bench.run(PROMPT)
    assert plan(bench, PROMPT, ["3"]) == Plan(["3", "2", "1"], [], [])
    assert Number.calls == [3]


def test_what_stands_behind_a_known_result_is_not_needed() -> None:
    bench = Bench()
    bench.run(PROMPT)
    changed = PROMPT | {"3": make("Show", value=["2", 0], salt=1)}
    found = plan(bench, changed, ["3"])
    assert found.would_run == ["3"]
    assert set(found.cached) == {"1", "2"}
