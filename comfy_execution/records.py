"""What happened to each node of a prompt: time, cache, memory, and why it ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from comfy_execution.signatures import Parts, explain

MOST_NODES = 2000
"""Nodes that a job record describes one by one; longer ones would crowd the history."""
SHORT_S = 0.001
"""Nodes that run no longer cannot fill much memory: the highest use is not measured anew for them,
which would take a tenth of their time."""


class RunRecord:
    """Figures of one prompt, by node.

    Args:
        before: What signatures of the previous prompt were made of, to explain differences.
        now: The same for this prompt; filled while it runs.
    """

    def __init__(self, before: Mapping[str, Parts], now: Mapping[str, Parts]) -> None:
        self._before = before
        self._now = now
        self._started: dict[str, float] = {}
        self._nodes: dict[str, dict[str, Any]] = {}
        self._peak_bytes: int | None = None

    def start(self, node_id: str) -> None:
        """A node is called; a second call (after waiting) does not start the clock again."""
        self._started.setdefault(node_id, time.perf_counter())

    def cached(self, node_id: str) -> None:
        """A result from the cache stands for the node."""
        if len(self._nodes) < MOST_NODES:
            self._nodes[node_id] = {"cached": True}

    def finish(
        self,
        node_id: str,
        class_type: str,
        peak_memory: Callable[[], int | None],
        *,
        failed: bool = False,
    ) -> None:
        """A node has run to its end, or failed.

        Args:
            peak_memory: Measures the highest memory use up to now, in bytes.
        """
        if len(self._nodes) >= MOST_NODES:
            return
        took = time.perf_counter() - self._started.get(node_id, time.perf_counter())
        entry: dict[str, Any] = {
            "class_type": class_type,
            "cached": False,
            "wall_ms": round(took * 1000, 3),
        }
        if node_id in self._now:
            entry["reason"] = explain(self._before.get(node_id), self._now[node_id])
        if took > SHORT_S or self._peak_bytes is None:
            self._peak_bytes = peak_memory()
        if self._peak_bytes is not None:
            entry["peak_memory_bytes"] = self._peak_bytes
        if failed:
            entry["failed"] = True
        self._nodes[node_id] = entry

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Node id -> figures, in order of completion."""
        return self._nodes
