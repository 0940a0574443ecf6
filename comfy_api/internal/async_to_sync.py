"""Twins of async classes for callers that are not async.

A node's `execute` may be a plain function that runs on a thread whose event loop is busy running
it. Its calls go to a loop on another thread, with the caller's context variables: the node that is
executing stays known.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_sync(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine, waited for on this thread; exceptions are passed on."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    return _run_elsewhere(coroutine)


def _run_elsewhere(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Runs a coroutine to its end on a thread of its own."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001 - raised again on the caller's thread
            errors.append(error)

    context = contextvars.copy_context()
    thread = threading.Thread(target=context.run, args=(run,), name="api-call", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs a bound async method to its end."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return run_sync(method(*args, **kwargs))

    return call


class SyncProxy:
    """Stands for an object: its async methods become plain, the parts it owns likewise.

    Subclasses made by `create_sync_class` set `async_class`, the class of the object.
    """

    async_class: type = object

    def __init__(self, target: Any = None) -> None:
        self._target = self.async_class() if target is None else target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if inspect.iscoroutinefunction(value):
            return _plain(value)
        if getattr(type(value), "HAS_SYNC_TWIN", False):
            return SyncProxy(value)
        return value


def create_sync_class(async_class: type) -> type[SyncProxy]:
    """The twin of a class: same members, async methods run to their end."""
    return type(f"{async_class.__name__}Sync", (SyncProxy,), {"async_class": async_class})
