"""What a place works with: the prompt it was given, and the server that takes the news of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from comfy_execution import events
from comfy_execution.items import QueueItem
from comfy_execution.workers.affinity import Models


class NewsSink(events.EventSink, Protocol):
    """Where news of workers go: the server, as node packages know it."""

    def send_sync(self, event: str | int, data: Any, sid: str | None = None) -> None:
        """Sends what a node package sends by itself."""

    def news_of(self, item: QueueItem | None) -> AbstractContextManager[None]:
        """While the block runs, what this thread sends is news of this prompt."""

    def client_info(self, client_id: str | None) -> Any:
        """What is known of the socket of a client, as plain JSON; None if there is none."""


@dataclass
class Job:
    """A prompt that a worker is to run.

    Attributes:
        key: The queue's key of it.
        models: What it loads.
        is_sent: Whether the worker has it.
        is_stopped: Whether somebody stopped it.
    """

    item: QueueItem
    models: Models
    key: int = -1
    is_sent: bool = False
    is_stopped: bool = False

    @property
    def prompt_id(self) -> str:
        """Id of the prompt."""
        return self.item[1]


class WorkerGone(RuntimeError):
    """The worker that was asked something is not there."""
