"""Waiting for what comes soon, on a machine that may have much else to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")
PATIENCE_S = 60.0


def read_until(read: Callable[[], Found], expected: Found, patience_s: float = PATIENCE_S) -> Found:
    """Reads again and again until that gives `expected`; returns what it gave last.

    For what follows an event without being part of it: a file that is written after a dialog has
    closed. An assertion that compares the two shows both when the wait was in vain.
    """
    deadline = time.monotonic() + patience_s
    while (found := read()) != expected and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
