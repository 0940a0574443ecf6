"""All workers of a server: hands them prompts, and stands where one worker stands without them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from comfy_execution import events
from comfy_execution.items import ExecutionStatus, public_item
from comfy_execution.pending import Pending, PendingPrompts
from comfy_execution.planning import Plan
from comfy_execution.queue import PromptQueue
from comfy_execution.registry import Registry
from comfy_execution.workers.affinity import Chooser, best_place, models_of
from comfy_execution.workers.job import NewsSink, WorkerGone
from comfy_execution.workers.place import Place

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0


class WorkerPool:
    """Hands prompts to free workers, from a thread of its own.

    Args:
        queue: Where prompts come from. It must have no interrupt flag: each worker has its own.
        places: The workers; they are started here.
        registry: Knows node classes.
        sink: Where news go.
    """

    def __init__(
        self, queue: PromptQueue, places: Sequence[Place], registry: Registry, sink: NewsSink
    ) -> None:
        self._queue, self._sink = queue, sink
        self.places = list(places)
        self._registry = registry
        self._chooser = Chooser(registry)
        self._chosen: Place | None = None  # by `_choose`, for the prompt that `get` returns
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker-pool", daemon=True)
        queue.add_interrupt_listener(self._stop_prompt)

    def start(self) -> None:
        """Hands out prompts from here on; the workers have been started before."""
        self._thread.start()

    def stop(self, timeout_s: float = 8.0) -> bool:
        """Ends all workers; says whether they ended in time.

        Prompts that run are stopped. With a journal they are the next process's first ones.
        """
        self._stopping.set()
        self._queue.wake()
        deadline = time.monotonic() + timeout_s
        for place in self.places:
            place.end()
        in_time = [place.join(max(0.1, deadline - time.monotonic())) for place in self.places]
        if self._thread.ident is not None:
            self._thread.join(IDLE_CHECK_S)
        return all(in_time)

    # --- for the server -----------------------------------------------------------------------

    def health(self) -> list[dict[str, Any]]:
        """State of every worker as plain JSON."""
        return [place.health() for place in self.places]

    def memory(self) -> list[dict[str, Any]]:
        """Which models hold how much of which device, in all workers."""
        return [{**row, "worker": place.name} for place in self.places for row in place.memory]

    def not_ready(self) -> str | None:
        """Why no prompt can run now; None if one can."""
        if any(place.is_ready for place in self.places):
            return None
        refusals = [f"worker {p.name}: {p.refusal}" for p in self.places if p.refusal]
        return "; ".join(refusals) or "the workers are starting"

    async def plan(
        self, prompt: dict[str, Any], outputs: Sequence[str], extra_data: Mapping[str, Any]
    ) -> Plan | None:
        """What a prompt would do in the worker it would rather go to; None if that is not there."""
        ready = [place for place in self.places if place.is_ready]
        wanted = models_of(prompt, self._registry)
        place = best_place(wanted, extra_data.get("client_id"), ready)
        if place is None:
            return None
        given = {"prompt": prompt, "outputs": list(outputs), "extra_data": dict(extra_data)}
        try:
            return Plan(**await asyncio.wrap_future(place.ask("plan", given)))
        except WorkerGone:
            return None

    # --- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._obey_flags()
            self._chosen = None
            found = self._queue.get(IDLE_CHECK_S, self._choose)
            if found is None:
                continue
            self._obey_flags()  # what was asked for before this prompt comes before it
            item, key = found
            if self._chosen is not None:
                self._chosen.run(key)
            else:
                with self._sink.news_of(item):
                    self._refuse(item[1], item[2], item[3].get("client_id"), key)

    def _choose(self, pending: PendingPrompts) -> Pending | None:
        """The prompt to hand out, its place kept for it; the queue's lock is held."""
        free = [place for place in self.places if place.is_free]
        if not free or self._stopping.is_set():
            return None
        first = pending.first()
        if all(place.is_ready and place.lacks(first) for place in self.places):
            return first  # and no place: it is refused
        found = self._chooser.choose(pending, free)
        if found is None:
            return None
        entry, self._chosen = found
        self._chosen.take(entry.item, self._chooser.models(entry))
        return entry

    def _obey_flags(self) -> None:
        flags = self._queue.get_flags()
        if flags:
            for place in self.places:
                place.free(flags)

    def _stop_prompt(self, prompt_id: str) -> None:
        for place in self.places:
            place.stop(prompt_id)

    def _refuse(self, prompt_id: str, prompt: dict[str, Any], client_id: Any, key: int) -> None:
        """Ends a prompt whose node classes no worker has."""
        lacks = {place.name: place.missing(prompt) for place in self.places}
        told = "; ".join(f"worker {name}: {', '.join(some)}" for name, some in lacks.items())
        error = events.ExecutionError(
            prompt_id, "", "", (),
            f"No worker has all node classes of this prompt. Missing in {told}. Install the same "
            "packages for every worker.\n",
            "MissingNodeClass", timestamp=events.now_ms(), client_id=client_id,
        )  # fmt: skip
        status = ExecutionStatus("error", False, [(error.name, error.payload())])
        nothing: dict[str, Any] = {"outputs": {}, "meta": {}}
        self._queue.task_done(
            key, nothing, status, public_item, announce=lambda: self._sink.publish(error)
        )
        if client_id is not None:
            self._sink.publish(events.Executing(None, prompt_id, client_id=client_id))
