"""Waiting for prompts to end, for requests that want the result as their answer."""

from __future__ import annotations

import asyncio

from aiohttp import web

from comfy_execution.queue import PromptQueue

CHECK_S = 5.0  # how often a waiting request looks whether its prompt was taken out of the queue


class Completions:
    """Lets coroutines wait for the end of a prompt."""

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: PromptQueue) -> None:
        self._loop = loop
        self._queue = queue
        self._waiting: dict[str, set[asyncio.Event]] = {}
        queue.add_finished_listener(self._on_finished)

    async def wait(self, prompt_id: str) -> bool:
        """Waits until the prompt is in the history; False if it was taken out of the queue."""
        event = asyncio.Event()
        events = self._waiting.setdefault(prompt_id, set())
        events.add(event)
        try:
            while prompt_id not in self._queue.history:
                if not self._is_queued(prompt_id):
                    return prompt_id in self._queue.history
                try:
                    await asyncio.wait_for(event.wait(), CHECK_S)
                except asyncio.TimeoutError:
                    continue
            return True
        finally:
            events.discard(event)
            if not events:
                self._waiting.pop(prompt_id, None)

    def _is_queued(self, prompt_id: str) -> bool:
        running, pending = self._queue.get_current_queue()
        return any(item[1] == prompt_id for item in (*running, *pending))

    def _on_finished(self, prompt_id: str) -> None:
        """Called by the worker."""
        if prompt_id in self._waiting and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, prompt_id)

    def _wake(self, prompt_id: str) -> None:
        for event in self._waiting.get(prompt_id, ()):
            event.set()


COMPLETIONS: web.AppKey[Completions] = web.AppKey("completions", Completions)
