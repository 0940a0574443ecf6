"""What an executor is given: policies, hooks, and the cancellation flag."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from comfy_execution.caching import ClassicCache, ResultCache
from comfy_execution.items import Interrupt
from comfy_execution.memory import process_peak_bytes
from comfy_execution.privacy import Privacy


class ExecutionInterrupt(Interrupt, Protocol):
    """The cancellation flag, with the exception that stands for it."""

    @property
    def exception(self) -> type[BaseException]: ...


@dataclass(frozen=True)
class ExecutorOptions:
    """Policies and hooks of an executor; every one has a harmless default.

    Attributes:
        cache: What is kept between prompts.
        run_context: Makes the context manager in which a prompt runs, such as inference mode.
        oom_hook: Called with what a node raised; if it was for lack of memory, frees some and
            returns the message that people see, else returns None.
        ui_is_valid: Whether the files a cached output node shows are still there.
        see_inputs: Called with the values a node is about to get, by input name: what really flows
            along links, results from caches and of expanded graphs included.
        peak_memory: Highest memory use in bytes up to now, for the record of each node; None if
            unknown.
        privacy: Where users have files of their own, whose results are whose.
        environment: What results depend on besides graph and files (versions, device), for the
            history.
    """

    cache: ResultCache = field(default_factory=ClassicCache)
    run_context: Callable[[], AbstractContextManager[Any]] = nullcontext
    oom_hook: Callable[[BaseException], str | None] = lambda _: None
    ui_is_valid: Callable[[Mapping[str, Any]], bool] = lambda _: True
    see_inputs: Callable[[Mapping[str, list[Any]]], None] = lambda _: None
    peak_memory: Callable[[], int | None] = process_peak_bytes
    privacy: Privacy = field(default_factory=Privacy)
    environment: Callable[[], Mapping[str, Any]] = dict


class NeverInterrupted(BaseException):
    """Raised by nobody."""


class NoInterrupt:
    """For executors that nobody stops."""

    exception: type[BaseException] = NeverInterrupted

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool:
        return False
