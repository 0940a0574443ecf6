"""Breaking out of a node that does not look whether it is to stop.

An interruption that a node has not noticed after a while is raised inside it, as an asynchronous
exception in its thread; a node that swallows even that gets one that ``except Exception`` does not
catch, again and again. The exception can only arrive while the node's own code runs: the guard
marks that time, and takes back an exception that would arrive later. Code inside a C function
cannot be broken; only a restart of the process helps there, which the owner may ask for.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class ForcedInterruption(BaseException):
    """Raised inside a node that ignores interruptions."""


class CallGuard:
    """Marks the time in which an exception may be raised inside a thread; one for each worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self._is_raised = False

    def enter(self) -> None:
        """Foreign code starts in this thread."""
        self._thread_id = threading.get_ident()

    def leave(self) -> None:
        """Foreign code has ended; an exception still on its way is taken back. Idempotent."""
        with self._lock:
            if self._is_raised and self._thread_id is not None:
                _set_async_exception(self._thread_id, None)
                self._is_raised = False
            self._thread_id = None

    @property
    def is_inside(self) -> bool:
        """Whether foreign code is running."""
        return self._thread_id is not None

    def raise_inside(self, exception: type[BaseException]) -> bool:
        """Raises exception in the foreign code; False if none is running."""
        with self._lock:
            if self._thread_id is None:
                return False
            self._is_raised = True
            return _set_async_exception(self._thread_id, exception)


class Breaker:
    """Follows interruptions up: waits, then raises inside the node, then asks for a restart.

    Args:
        guard: Says whether node code is running and where.
        exception: Raised first: what nodes know as the interruption.
        is_running: Whether the interrupted prompt still runs.
        patience_s: How long a node has to stop by itself.
        restart: Called if nothing helps; None waits for ever.
        restart_after_s: When that is, counted from the interruption.
    """

    def __init__(
        self,
        guard: CallGuard,
        exception: type[BaseException],
        is_running: Callable[[str], bool],
        *,
        patience_s: float = 1.0,
        restart: Callable[[], None] | None = None,
        restart_after_s: float = 30.0,
    ) -> None:
        self._guard = guard
        self._exception = exception
        self._is_running = is_running
        self._patience_s = patience_s
        self._restart = restart
        self._restart_after_s = restart_after_s
        self._followed: set[str] = set()
        self._lock = threading.Lock()

    def follow(self, prompt_id: str) -> None:
        """Sees to it that the prompt stops; returns at once."""
        with self._lock:
            if prompt_id in self._followed:
                return
            self._followed.add(prompt_id)
        threading.Thread(
            target=self._follow, args=(prompt_id,), name="interruption", daemon=True
        ).start()

    def _follow(self, prompt_id: str) -> None:
        started = time.monotonic()
        exceptions = [self._exception]
        try:
            while self._is_running(prompt_id):
                waited = time.monotonic() - started
                if waited >= self._patience_s:
                    if self._guard.raise_inside(exceptions[-1]):
                        logger.info("prompt %s ignores its interruption; breaking in", prompt_id)
                    exceptions.append(ForcedInterruption)
                if self._restart is not None and waited >= self._restart_after_s:
                    logger.error("prompt %s cannot be stopped; restarting", prompt_id)
                    self._restart()
                    return
                self._wait(prompt_id, self._patience_s if len(exceptions) == 1 else 0.25)
        finally:
            with self._lock:
                self._followed.discard(prompt_id)

    def _wait(self, prompt_id: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._is_running(prompt_id):
            time.sleep(0.01)


def _set_async_exception(thread_id: int, exception: type[BaseException] | None) -> bool:
    """Sets or takes back the asynchronous exception of a thread."""
    value = ctypes.py_object(exception) if exception is not None else None
    return bool(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), value))
