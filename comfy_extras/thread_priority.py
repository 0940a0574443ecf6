"""Keeps native libraries from making this process a real-time one.

SVT-AV1 gives the thread that opens it, and through it its own, the highest real-time priority where
the system lets it, as it does root. They would go before everything else on the machine, the
editor's browser and the server's own event loop included, and the first one for good.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

TASKS = Path("/proc/self/task")
"""One entry for each thread, on Linux."""


@contextlib.contextmanager
def ordinary_priority() -> Iterator[None]:
    """Threads of this process that became real-time ones in the block are made ordinary again."""
    before = _real_time_threads()
    try:
        yield
    finally:
        for thread in _real_time_threads() - before:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _real_time_threads() -> set[int]:
    found = set()
    for thread in map(int, os.listdir(TASKS)) if TASKS.is_dir() else ():
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getscheduler(thread) in (os.SCHED_FIFO, os.SCHED_RR):
                found.add(thread)
    return found
