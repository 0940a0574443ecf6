"""Measuring memory: what results hold, and what the machine has left."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def estimate_bytes(values: Iterable[Any]) -> int:
    """Bytes that arrays and texts among the values hold; a rough lower bound for the rest."""
    total, stack, seen = 0, list(values), set()
    while stack:
        value: Any = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        size = getattr(value, "nbytes", None)
        if isinstance(size, int):
            total += size
        elif isinstance(value, (str, bytes)):
            total += len(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
        else:
            total += 64
    return total


def free_memory_bytes() -> int:
    """Free memory of the machine, from the kernel; other systems give the executor a measure.

    Raises:
        OSError: this system has no /proc/meminfo.
    """
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo names no available memory; pass a free_bytes function")


def process_peak_bytes() -> int | None:
    """Most memory this process has used so far; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
