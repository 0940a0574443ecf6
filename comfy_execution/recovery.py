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
        queue.record_lost(item, fingerprint, crashed_status(crash_error(item)))
    for item, fingerprint in found.stopped:
        queue.record_lost(item, fingerprint, cancelled_status(item[1]))
    queue.restore(found.pending, paused=mode is StartMode.PAUSE)
    if found.pending or found.abandoned:
        logger.info(
            "queue restored: %d prompts wait (%d of them were interrupted and start again), "
            "%d could not be finished",
            len(found.pending), len(found.retried), len(found.abandoned),
        )  # fmt: skip


def crash_error(item: QueueItem, what: str = "The server process") -> events.ExecutionError:
    """The error of a prompt under which a process died.

    Args:
        what: The process.
    """
    outputs = item[4]
    node_id = outputs[0] if outputs else ""
    return events.ExecutionError(
        item[1],
        node_id,
        str(item[2].get(node_id, {}).get("class_type", "")),
        (),
        f"{what} ended while this prompt was running, so it was not finished. The node "
        "that was running may have crashed native code or used up the memory; see the log.\n",
        "ServerCrashed",
        timestamp=events.now_ms(),
        client_id=item[3].get("client_id"),
    )


def crashed_status(error: events.ExecutionError) -> ExecutionStatus:
    """Status of a prompt that ended with such an error."""
    messages: list[Any] = [(error.name, error.payload())]
    return ExecutionStatus("error", False, messages)
