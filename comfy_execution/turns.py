"""Long work on the event loop, in short pieces: whoever else waits gets a turn between them."""

from __future__ import annotations

import asyncio
import time

BURST_S = 0.004
"""The longest that work goes on without a look at others."""


class Turns:
    """Says when others are due for a turn; ``if turns.due: await turns.give()`` in every loop."""

    def __init__(self, burst_s: float = BURST_S) -> None:
        self._burst_s = burst_s
        self._due_at = time.perf_counter() + burst_s

    @property
    def due(self) -> bool:
        """Whether the work has gone on for long enough."""
        return time.perf_counter() > self._due_at

    async def give(self) -> None:
        """Lets everybody run who is ready to."""
        await asyncio.sleep(0)
        self._due_at = time.perf_counter() + self._burst_s
