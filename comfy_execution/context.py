"""Which node of which prompt the current code runs for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class ExecutionContext(NamedTuple):
    """Where execution is.

    Attributes:
        prompt_id: The running prompt.
        node_id: The running node; the long id for nodes of an expanded graph.
        list_index: Which call of the node this is, when it runs over a list.
    """

    prompt_id: str
    node_id: str
    list_index: int | None = None


_current: ContextVar[ExecutionContext | None] = ContextVar("executing_context", default=None)


def get_executing_context() -> ExecutionContext | None:
    """The node this code runs for; None outside of nodes and in threads that a node started."""
    return _current.get()


@contextmanager
def executing(context: ExecutionContext | None) -> Iterator[None]:
    """Makes context the current one while the block runs, and in tasks it creates."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


set_executing_context = _current.set
"""Makes a context current until the next call; what the executor uses between its own steps."""


interrupt_check: ContextVar[Callable[[], None] | None] = ContextVar("interrupt_check", default=None)
"""Raises the interruption if the running prompt is to stop; set by the executor for its thread."""


def check_interrupt() -> None:
    """Raises the interruption if somebody stopped the prompt this code runs for."""
    check = interrupt_check.get()
    if check is not None:
        check()
