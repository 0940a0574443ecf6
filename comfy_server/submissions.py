"""Prompts on their way from requests into the queue.

Those that arrive while the disk is busy wait for one another and go in together: one flush, one
hand-over to another thread and back, one news of the queue for many prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from comfy_execution.admission import Outcome
from comfy_execution.items import Submission

MOST_AT_ONCE = 256  # one statement of the journal takes them all, and its length is bounded

Item = Sequence[Any]


class Submissions:
    """Belongs to the event loop; the queue is only touched in the thread that writes."""

    def __init__(self, submit_all: Callable[[Sequence[Item]], list[Outcome]]) -> None:
        self._submit_all = submit_all
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompt-submitter")
        self._waiting: list[tuple[Item, asyncio.Future[Outcome]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Submission:
        """Puts a prompt in the queue; it is on disk when this returns.

        Raises:
            Exception: what the queue raises for this item.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Outcome] = loop.create_future()
        self._waiting.append((item, answer))
        if self._writer is None:
            self._writer = loop.create_task(self._write())
        outcome = await answer
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def _write(self) -> None:
        """Takes what waits, in order of arrival, until nothing does."""
        while self._waiting:
            batch = self._waiting[:MOST_AT_ONCE]
            del self._waiting[:MOST_AT_ONCE]
            outcomes = await self._submit([item for item, _ in batch])
            for (_, answer), outcome in zip(batch, outcomes):
                if not answer.done():  # the client may have gone
                    answer.set_result(outcome)
        self._writer = None

    async def _submit(self, batch: Sequence[Item]) -> list[Outcome]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._submit_all, batch)
        except Exception as error:  # noqa: BLE001 - every request is told; later ones must go on
            return [error] * len(batch)
