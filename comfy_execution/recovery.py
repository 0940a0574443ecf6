"""Taking over what a previous process left in the journal."""

from __future__ import annotations

import logging
from enum import Enum
from typing import Any

from comfy_execution import events
from comfy_execution.items import ExecutionStatus, QueueItem, cancelled_status
from comfy_execution.journal import Journal
from comfy_execution.queue import PromptQueue

logger = logging.getLogger(__name__)


class StartMode(Enum):
    """What to do at start with prompts that were waiting."""

    RESUME = "resume"
    PAUSE = "pause"
    CLEAR = "clear"


def recover(
    queue: PromptQueue,
    journal: Journal,
    mode: StartMode = StartMode.RESUME,
    *,
    retry_running: bool = True,
) -> None:
    """Puts prompts back into the queue, in order, with their client ids.

    A prompt that was running is tried once more, first of all; if that was its second try already,
    or retries are refused, it goes to the history as failed. One that somebody had stopped goes
    there as such.

    Args:
        mode: RESUME runs them, PAUSE holds them until the queue is resumed, CLEAR drops them.
        retry_running: False after a crash in native code, which would only crash again.
    """
    if mode is StartMode.CLEAR:
        journal.clear_queue()
        return
    found = journal.recover(retry_running=retry_running)
    for item, fingerprint in found.abandoned:
        queue.record_lost(item, fingerprint, _crashed(item))
    for item, fingerprint in found.stopped:
        queue.record_lost(item, fingerprint, cancelled_status(item[1]))
    queue.restore(found.pending, paused=mode is StartMode.PAUSE)
    if found.pending or found.abandoned:
        logger.info(
            "queue restored: %d prompts wait (%d of them were interrupted and start again), "
            "%d could not be finished",
            len(found.pending), len(found.retried), len(found.abandoned),
        )  # fmt: skip


def _crashed(item: QueueItem) -> ExecutionStatus:
    """Status of a prompt under which the process died."""
    prompt_id, outputs = item[1], item[4]
    node_id = outputs[0] if outputs else ""
    node_type = str(item[2].get(node_id, {}).get("class_type", ""))
    error = events.ExecutionError(
        prompt_id,
        node_id,
        node_type,
        (),
        "The server process ended while this prompt was running, so it was not finished. The node "
        "that was running may have crashed native code or used up the memory; see the log.\n",
        "ServerCrashed",
        timestamp=events.now_ms(),
    )
    messages: list[Any] = [("execution_error", error.payload())]
    return ExecutionStatus("error", False, messages)
