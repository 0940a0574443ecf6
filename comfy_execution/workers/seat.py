"""The worker's end of the seam: does what the server says, and says what has come of it."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from comfy_execution.admission import Outcome
from comfy_execution.items import QueueItem, Submission, SubmissionKind, normalize_item
from comfy_execution.planning import Plan
from comfy_execution.queue import PromptQueue
from comfy_execution.workers.channel import Channel, ChannelClosed
from comfy_execution.workers.messages import Message

logger = logging.getLogger(__name__)

HEALTH_EVERY_S = 2.0

Planner = Callable[[dict[str, Any], list[str], dict[str, Any]], Any]


class WorkerQueue(PromptQueue):
    """The queue inside a worker: the one prompt that it has, and nothing that lasts.

    A stop that comes before its prompt has begun is kept for it, so that it ends as others do. What
    a node submits goes to the server's queue.

    Attributes:
        hand_on: Takes the prompts that nodes submit.
    """

    hand_on: Callable[[QueueItem], None] = staticmethod(lambda _: None)
    _stopped_early: str | None = None

    def take(self, item: Sequence[Any]) -> None:
        """Queues the prompt that this worker is to run."""
        super().submit_all([item])

    def submit_all(self, given: Sequence[Sequence[Any]]) -> list[Outcome]:
        """Hands prompts on; that the server refuses one, such as for its id, is in its log."""
        items = [normalize_item(item) for item in given]
        for item in items:
            self.hand_on(item)
        return [Submission(SubmissionKind.ACCEPTED, item[1], item[0]) for item in items]

    def get(self, *arguments: Any, **options: Any) -> tuple[QueueItem, int] | None:
        """As without workers; a prompt that was stopped already finds the flag set."""
        found = super().get(*arguments, **options)
        if found is not None and found[0][1] == self._stopped_early:
            self.interrupt(found[0][1])
        return found

    def stop(self, prompt_id: str) -> None:
        """Stops a prompt, be it that it runs or that it is about to."""
        with self.mutex:
            if self._pending.find(prompt_id) is not None:
                self._stopped_early = prompt_id
        self.interrupt(prompt_id)


class Seat:
    """Joins a worker's queue to the server.

    Args:
        channel: To the server.
        queue: Where prompts go.
        clients: Client id -> what is known of its socket, for previews and node packages.
        plan: Plans a prompt, for dry runs: a coroutine that gives a ``Plan``.
        memory: Which models hold how much of which device.
        lost: Called when the server is gone, in whatever thread finds out.
    """

    def __init__(
        self,
        channel: Channel,
        queue: WorkerQueue,
        clients: dict[str, Any],
        plan: Planner,
        memory: Callable[[], list[dict[str, Any]]],
        lost: Callable[[], object] = lambda: os._exit(1),
    ) -> None:
        self._channel, self._queue, self._clients = channel, queue, clients
        self._plan, self._memory, self._lost = plan, memory, lost
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._told: Any = None
        queue.add_finished_listener(self._finished)
        queue.hand_on = lambda item: self.say({"say": "submit", "item": list(item)})

    async def serve(self, about: Mapping[str, Any]) -> None:
        """Works until the server says that it is enough.

        Args:
            about: What the server is told of this worker.
        """
        threading.Thread(target=self._listen, name="seat", daemon=True).start()
        self.say({"say": "ready", **about})
        while not self._ended.is_set():
            self._tell_health()
            try:
                await asyncio.wait_for(self._ended.wait(), HEALTH_EVERY_S)
            except asyncio.TimeoutError:
                continue

    def say(self, message: Message) -> None:
        """Sends news; from any thread. Without a server there is nothing left to do."""
        try:
            self._channel.send(message)
        except ChannelClosed:
            self._lost()

    def _listen(self) -> None:
        """Does what the server says, as it comes."""
        while True:
            try:
                message = self._channel.receive()
            except ChannelClosed:
                self._lost()
                return
            try:
                self._obey(message)
            except Exception:  # one bad message must not end the worker
                logger.exception("a message of the server could not be obeyed")

    def _obey(self, message: Message) -> None:
        kind = message["do"]
        if kind == "run":
            item = message["item"]
            client_id = item[3].get("client_id")
            self._clients.clear()
            if client_id is not None and message["client"] is not None:
                self._clients[client_id] = message["client"]
            self._queue.take(item)
        elif kind == "stop":
            self._queue.stop(message["prompt_id"])
        elif kind == "free":
            for name, value in message["flags"].items():
                self._queue.set_flag(name, value)
        elif kind == "answer":
            asyncio.run_coroutine_threadsafe(self._answer(message), self._loop)
        elif kind == "end":
            self._loop.call_soon_threadsafe(self._ended.set)
        else:
            raise ValueError(f"unknown message {kind!r}")

    async def _answer(self, message: Message) -> None:
        """Answers a question; there is one kind."""
        given, answer = message["given"], {"say": "answered", "id": message["id"]}
        try:
            plan: Plan = await self._plan(given["prompt"], given["outputs"], given["extra_data"])
            self.say({**answer, "value": asdict(plan)})
        except Exception as error:  # the asker learns of it
            logger.exception("a question of the server could not be answered")
            self.say({**answer, "error": f"{type(error).__name__}: {error}"})

    def _finished(self, prompt_id: str) -> None:
        entry = self._queue.get_history(prompt_id)[prompt_id]
        self._queue.delete_history_item(prompt_id)
        del entry["prompt"]
        self._tell_health()
        self.say({"say": "done", "prompt_id": prompt_id, "result": entry})

    def _tell_health(self) -> None:
        memory = self._memory()
        if memory != self._told:
            self._told = memory
            self.say({"say": "health", "memory": memory})
