"""Coroutine functions in every place where the contract allows one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from comfy.utils import ProgressBar
from comfy_execution.graph_utils import GraphBuilder
from comfy_execution.utils import get_executing_context

INT = ("INT", {"default": 0})
SECONDS = ("FLOAT", {"default": 0.1, "min": 0.0, "max": 60.0})


class Nap:
    """Hands a number on after a while, during which others may run."""

    RETURN_TYPES = ("INT",)
    FUNCTION = "sleep"
    CATEGORY = "trial/async"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT, "seconds": SECONDS}}

    async def sleep(self, value: Any, seconds: float) -> Any:
        await asyncio.sleep(seconds)
        return (value,)


class NapThenFail(Nap):
    """Raises after a while."""

    async def sleep(self, value: Any, seconds: float) -> Any:
        await asyncio.sleep(seconds)
        raise RuntimeError(f"woke up badly at {value}")


class NapAtMost(Nap):
    """Sleeps too long for its own patience, and says so; -1 if it gave up."""

    async def sleep(self, value: Any, seconds: float) -> Any:
        try:
            await asyncio.wait_for(asyncio.sleep(seconds), timeout=0.02)
        except asyncio.TimeoutError:
            return (-1,)
        return (value,)


class NapMany(Nap):
    """Waits for many things of its own at once."""

    async def sleep(self, value: Any, seconds: float) -> Any:
        async def one(number: int) -> int:
            await asyncio.sleep(seconds)
            return number

        return (sum(await asyncio.gather(*map(one, range(value)))),)


class NapTwice(Nap):
    """Expands after a while."""

    async def sleep(self, value: Any, seconds: float) -> Any:
        await asyncio.sleep(seconds)
        build = GraphBuilder()
        return {
            "result": (build.node("TrialAdd", a=value, b=value).out(0),),
            "expand": build.finalize(),
        }


class NapGroup(Nap):
    """Expands into naps that overlap, and their sum."""

    RETURN_TYPES = ("INT",)

    async def sleep(self, value: Any, seconds: float) -> Any:
        build = GraphBuilder()
        naps = [build.node("TrialNap", value=n, seconds=seconds) for n in range(value)]
        total = build.node("TrialSum", **{f"n{i}": nap.out(0) for i, nap in enumerate(naps)})
        return {"result": (total.out(0),), "expand": build.finalize()}


class NapShow(Nap):
    """An output node that is async."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True

    async def sleep(self, value: Any, seconds: float) -> Any:
        await asyncio.sleep(seconds)
        return {"ui": {"value": [value]}}


class NapBetween(Nap):
    """Chooses lazily, after a while, which of two numbers it needs."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        lazy = ("INT", {"lazy": True})
        return {"required": {"second": ("BOOLEAN",), "a": lazy, "b": lazy}}

    async def check_lazy_status(self, second: bool, a: Any, b: Any) -> list[str]:
        await asyncio.sleep(0.01)
        name, value = ("b", b) if second else ("a", a)
        return [name] if value is None else []

    async def sleep(self, second: bool, a: Any = None, b: Any = None) -> Any:
        return (b if second else a,)


class NapSteps(Nap):
    """Reports progress between its waits, and returns where it believes to run."""

    RETURN_TYPES = ("STRING",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": INT, "steps": INT, "seconds": SECONDS}}

    async def sleep(self, value: int, steps: int, seconds: float) -> Any:
        progress = ProgressBar(steps)
        for _ in range(steps):
            await asyncio.sleep(seconds / steps)
            progress.update(1)
        context = get_executing_context()
        return (f"{context.node_id}:{context.list_index}",)


class Spin(Nap):
    """Async in name only: works without ever waiting."""

    async def sleep(self, value: Any, seconds: float) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return (value,)


class NapBlocking(Nap):
    """Async, over lists: sleeps as long as each number says, in hundredths."""

    async def sleep(self, value: Any, seconds: float) -> Any:
        await asyncio.sleep(value / 100)
        return (value * 2,)


NODES = (
    Nap, NapThenFail, NapAtMost, NapMany, NapTwice, NapGroup, NapShow, NapBetween, NapSteps, Spin,
    NapBlocking,
)  # fmt: skip
