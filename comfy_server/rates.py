"""Counting requests per asker, so that one cannot take all."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

MOST_KEYS = 20_000


class RateLimit:
    """Token buckets: `per_minute` requests a minute, bursts of up to that many."""

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = float(per_minute)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> float | None:
        """Counts one request; None if it may pass, else the seconds to wait."""
        now = self._clock()
        level, last = self._buckets.pop(key, (self._capacity, now))
        level = min(self._capacity, level + (now - last) * self._capacity / 60.0)
        allowed = level >= 1.0
        self._buckets[key] = (level - 1.0 if allowed else level, now)
        if len(self._buckets) > MOST_KEYS:
            self._buckets.popitem(last=False)
        return None if allowed else (1.0 - level) * 60.0 / self._capacity
