"""Threads work in the folders of the user in whose prompt or request they were started.

A scope is a context variable, and threads begin without those of whoever starts them (before the
option of Python 3.14 that changes it). With users who have folders of their own that would show a
node's threads the folders of all. So while `inherited_by_threads` is in force, a thread that is
started inside a scope runs in a copy of the starter's context. What is given to a pool runs in a
copy of the giver's, whoever had the pool's threads started: pools outlive prompts.

A thread that a package starts once and feeds by a queue of its own stays in the scope it was
started in.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from utils.user_scope import scoped_user


@contextlib.contextmanager
def inherited_by_threads() -> Iterator[None]:
    """Inside, `threading.Thread` and `ThreadPoolExecutor` hand the scope on.

    Both are changed for the whole process, as every package has its own way to them, and are as
    they were afterwards.
    """
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit

    @functools.wraps(start)
    def start_in_scope(self: threading.Thread) -> None:
        if scoped_user():
            _run_in(contextvars.copy_context(), self)
        start(self)

    @functools.wraps(submit)  # type: ignore[arg-type]
    def submit_in_context(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        return submit(self, contextvars.copy_context().run, fn, *args, **kwargs)

    threading.Thread.start = start_in_scope  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = submit_in_context  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]


def _run_in(context: contextvars.Context, thread: threading.Thread) -> None:
    """Has the work of a thread that is about to start done in a context."""
    own = vars(thread).get("run")  # set on this very thread by whoever made it

    def run_once() -> None:
        del thread.run  # or the thread and this function would keep each other
        if own is not None:
            thread.run = own  # type: ignore[method-assign]
        context.run(thread.run)

    thread.run = run_once  # type: ignore[method-assign]
