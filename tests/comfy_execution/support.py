"""Small nodes, a recording sink, and a bench that runs prompts with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from comfy_execution import events
from comfy_execution.caching import CacheEntry, NullCache, RAMPressureCache, ResultCache, make_cache
from comfy_execution.executor import PromptExecutor
from comfy_execution.options import ExecutorOptions
from comfy_execution.queue import PromptQueue
from comfy_execution.registry import NodeRegistry

Prompt = dict[str, dict[str, Any]]


class Recorder:
    """An event sink that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[events.Event] = []

    def publish(self, event: events.Event) -> None:
        event.payload()  # every event must have a wire form at the time it is sent
        self.events.append(event)

    def named(self, name: str) -> list[dict[str, Any]]:
        """Payloads of all events of this name."""
        return [event.payload() for event in self.events if event.name == name]

    def names(self) -> list[str]:
        return [event.name for event in self.events]


class Witness(Recorder):
    """Asks the history for a prompt at the very moment its end is announced.

    Attributes:
        queue: Whose history; nobody is asked before it is set.
        unrecorded: Ends that were announced before they were on record.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue: PromptQueue | None = None
        self.unrecorded: list[events.Event] = []

    def publish(self, event: events.Event) -> None:
        super().publish(event)
        if self.queue is None or not events.ends_prompt(event):
            return
        prompt_id = event.payload()["prompt_id"]
        if prompt_id not in self.queue.get_history(prompt_id) or self.queue.is_running(prompt_id):
            self.unrecorded.append(event)


class Flag:
    """A cancellation flag as the executor wants it."""

    class Stopped(BaseException):
        pass

    exception = Stopped

    def __init__(self) -> None:
        self.value = False

    def set(self) -> None:
        self.value = True

    def clear(self) -> None:
        self.value = False

    def is_set(self) -> bool:
        return self.value


class NodeBase:
    """Defaults of the stand-in nodes; each class counts its calls in ``calls``."""

    RETURN_TYPES: Any = ("INT",)
    FUNCTION = "run"
    CATEGORY = "test"
    calls: list[Any]

    def __init_subclass__(cls) -> None:
        cls.calls = []

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}


def node(name: str = "Node", inputs: Mapping[str, Any] | None = None, **attributes: Any) -> type:
    """A node class made on the spot; ``run`` among the attributes is its method."""
    sections = inputs if inputs is not None else {"required": {}}
    members = {"INPUT_TYPES": classmethod(lambda cls: sections), **attributes}
    return type(name, (NodeBase,), members)


def spec_free(*names: str, kind: str = "*") -> dict[str, Any]:
    """Sections with these required inputs of one type."""
    return {"required": dict.fromkeys(names, (kind,))}


class Number(NodeBase):
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("INT", {"default": 0})}}

    def run(self, value: int) -> tuple[int]:
        self.calls.append(value)
        return (value,)


class Add(NodeBase):
    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"a": ("INT",), "b": ("INT",)}}

    def run(self, a: int, b: int) -> tuple[int]:
        self.calls.append((a, b))
        return (a + b,)


class Show(NodeBase):
    """Output node that shows what it gets."""

    RETURN_TYPES = ()
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("*",)}}

    def run(self, value: Any) -> dict[str, Any]:
        self.calls.append(value)
        return {"ui": {"value": [value]}}


class Fail(NodeBase):
    """Raises whatever ``error`` is set to."""

    error: BaseException | type[BaseException] = ValueError("boom")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("*",)}}

    def run(self, value: Any) -> tuple[Any]:
        raise self.error


class Switch(NodeBase):
    """Evaluates only the branch it needs."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        lazy = ("INT", {"lazy": True})
        return {"required": {"which": ("BOOLEAN",), "yes": lazy, "no": lazy}}

    def check_lazy_status(self, which: bool, yes: Any = None, no: Any = None) -> list[str]:
        wanted = "yes" if which else "no"
        return [wanted] if (yes if which else no) is None else []

    def run(self, which: bool, yes: Any = None, no: Any = None) -> tuple[Any]:
        self.calls.append(which)
        return (yes if which else no,)


class Slow(NodeBase):
    """Async node: waits for the event of its name, so tests decide who ends when."""

    gates: dict[str, asyncio.Event]
    running = 0
    most_running = 0

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("*",), "turns": ("INT", {"default": 3})}}

    async def run(self, value: Any, turns: int) -> tuple[Any]:
        kind = type(self)
        kind.running += 1
        kind.most_running = max(kind.most_running, kind.running)
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.sleep(0.002)
        kind.running -= 1
        self.calls.append(value)
        return (value,)


CLASSES: dict[str, type] = {kind.__name__: kind for kind in (Number, Add, Show, Fail, Switch, Slow)}


def make(class_type: str, **inputs: Any) -> dict[str, Any]:
    """A node of a prompt."""
    return {"class_type": class_type, "inputs": inputs}


class Bench:
    """An executor with stand-in nodes; ``run`` answers with the history result."""

    def __init__(
        self,
        cache: ResultCache | None = None,
        classes: Mapping[str, type] | None = None,
        **options: Any,
    ) -> None:
        for kind in CLASSES.values():
            kind.calls.clear()  # type: ignore[attr-defined]
        self.sink = Recorder()
        self.flag = Flag()
        self.registry = NodeRegistry({**CLASSES, **(classes or {})})
        chosen = {"cache": cache} if cache is not None else {}
        self.executor = PromptExecutor(
            self.registry, self.sink, self.flag, ExecutorOptions(**chosen, **options)
        )
        self._count = 0

    def run(
        self, prompt: Prompt, outputs: Iterable[str] | None = None, **extra: Any
    ) -> dict[str, Any]:
        """Runs a prompt; all its output nodes unless some are named."""
        self._count += 1
        self.sink.events.clear()
        if outputs is None:
            outputs = [
                node_id
                for node_id, entry in prompt.items()
                if (spec := self.registry.get(entry["class_type"])) and spec.is_output
            ]
        extra.setdefault("client_id", "client")
        self.executor.execute(prompt, f"prompt-{self._count}", extra, list(outputs))
        return self.executor.history_result

    @property
    def error(self) -> dict[str, Any]:
        """Data of the error that ended the prompt."""
        name, data = self.executor.status_messages[-1]
        assert name == "execution_error", name
        return data

    def values(self, result: dict[str, Any]) -> dict[str, Any]:
        """What each Show node showed."""
        return {name: shown["value"] for name, shown in result["outputs"].items()}


def all_caches() -> dict[str, ResultCache]:
    """A fresh cache of every policy, small enough to be under pressure."""
    return {
        "classic": make_cache("classic"),
        "lru": make_cache("lru", lru_size=2),
        "lru_one": make_cache("lru", lru_size=1),
        "none": NullCache(),
        "ram": RAMPressureCache(1, lambda: 0, lambda entry: len(entry.outputs)),
        "ram_plenty": RAMPressureCache(0, lambda: 1, lambda entry: 1),
    }


POLICIES = list(all_caches())


def entry_of(*outputs: Any) -> CacheEntry:
    """A cache entry with one value for each output."""
    return CacheEntry([[value] for value in outputs])
