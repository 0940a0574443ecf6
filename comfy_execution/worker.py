"""The loop a worker thread runs: queue -> executor -> history."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from comfy_execution import events
from comfy_execution.executor import PromptExecutor
from comfy_execution.items import QueueItem, public_item
from comfy_execution.queue import PromptQueue

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0


@dataclass(frozen=True)
class WorkerHooks:
    """What happens between prompts.

    Attributes:
        before_prompt: Called with a prompt's extra data before it runs.
        unload_models: Frees the models that are on devices.
        collect: Gives unused memory back to the system; called when the queue has become empty.
        idle: Called about once a second while nothing waits.
    """

    before_prompt: Callable[[Mapping[str, Any]], None] = lambda _: None
    unload_models: Callable[[], None] = lambda: None
    collect: Callable[[], object] = lambda: None
    idle: Callable[[], object] = lambda: None


class Worker:
    """Runs prompts in its own thread until stopped.

    Args:
        queue: Where prompts come from and results go.
        executor: Runs them.
        hooks: Work between prompts.
    """

    def __init__(
        self, queue: PromptQueue, executor: PromptExecutor, hooks: WorkerHooks | None = None
    ) -> None:
        self.queue = queue
        self.executor = executor
        executor.announces_end = False
        self.hooks = hooks or WorkerHooks()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self.run, name="prompt-worker", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Ends the loop; says whether the thread has ended in time.

        The running prompt is stopped. With a journal it is the next process's first one.
        """
        self._stopping.set()
        self.queue.interrupt(for_good=False)
        self.queue.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def run(self) -> None:
        """The loop, in the calling thread."""
        has_garbage = False
        while not self._stopping.is_set():
            found = self.queue.get(timeout=IDLE_CHECK_S)
            if found is not None and self._stopping.is_set():
                self.queue.leave_to_next_process(found[1])
            elif found is not None:
                self._obey_flags()  # what was asked for before this prompt comes before it
                self._run_prompt(*found)
                has_garbage = True
            else:
                self._between_prompts(self.hooks.idle)
            has_garbage |= self._obey_flags()
            if has_garbage and not self.queue.get_tasks_remaining():
                self._between_prompts(self.hooks.collect)
                has_garbage = False

    def _run_prompt(self, item: QueueItem, key: int) -> None:
        prompt_id, prompt, secrets = item[1], item[2], item[5]
        executor = self.executor
        try:
            self.hooks.before_prompt(item[3])
            executor.execute(prompt, prompt_id, {**item[3], **secrets}, item[4])
        except BaseException as error:  # noqa: BLE001 - not a node's: the loop must go on
            executor.abandon(prompt_id, item[3], error)
        is_left = self._stopping.is_set() and self._was_interrupted()
        if is_left and self.queue.leave_to_next_process(key):
            executor.announce_end()
            return
        self._record(prompt_id, key)
        executor.announce_end()  # had it not been possible to record it
        client_id = item[3].get("client_id")
        if client_id is not None:
            executor.server.publish(events.Executing(None, prompt_id, client_id=client_id))
        nodes = executor.history_result.get("nodes") or {}
        executor.server.publish(events.NodeFigures(prompt_id, nodes))

    def _record(self, prompt_id: str, key: int) -> None:
        """Moves the prompt to the history; if its results cannot be kept, without them."""
        executor = self.executor
        nothing: dict[str, Any] = {"outputs": {}, "meta": {}}
        for result in (executor.history_result, nothing):
            try:
                self.queue.task_done(
                    key, result, executor.status, public_item, executor.announce_end
                )
                return
            except Exception:  # the loop must go on
                logger.exception("prompt %s has ended but could not be recorded", prompt_id)

    def _was_interrupted(self) -> bool:
        messages = self.executor.status_messages
        return bool(messages) and messages[-1][0] == events.ExecutionInterrupted.name

    def _obey_flags(self) -> bool:
        """Does what was asked for through flags; says whether something was freed."""
        flags = self.queue.get_flags()
        free_memory = bool(flags.get("free_memory", False))
        unload = bool(flags.get("unload_models", free_memory))
        if unload:
            self._between_prompts(self.hooks.unload_models)
        if free_memory:
            self.executor.reset()
        return unload or free_memory

    def _between_prompts(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception:
            logger.exception("work between prompts failed")
