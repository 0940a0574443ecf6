"""What can be seen of the queue and its history, and forgotten of the latter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from comfy_execution.history import HistoryStore
from comfy_execution.items import ItemTexts, QueueItem, item_json
from comfy_execution.pending import PendingPrompts


class QueueView:
    """The part of the queue that answers questions; the queue makes the members.

    Attributes:
        currently_running: Item key -> queue item, for node packages that look at what runs.
    """

    mutex: threading.RLock
    currently_running: dict[int, QueueItem]
    _pending: PendingPrompts
    _history: HistoryStore
    _texts: dict[int, ItemTexts]

    def get_current_queue(self) -> tuple[list[QueueItem], list[QueueItem]]:
        """Running and pending items, pending in the order they will run. Treat as read-only."""
        with self.mutex:
            return list(self.currently_running.values()), [entry.item for entry in self._pending]

    def read_json(self, sees: Callable[[QueueItem], bool]) -> bytes:
        """What ``/queue`` shows to somebody who sees these items: each as it was accepted."""
        with self.mutex:
            running = [(item, self._texts[key]) for key, item in self.currently_running.items()]
            pending = [(entry.item, entry.texts) for entry in self._pending]
        lists = [
            ",".join([item_json(item, texts) for item, texts in rows if sees(item)])
            for rows in (running, pending)
        ]
        return f'{{"queue_running":[{lists[0]}],"queue_pending":[{lists[1]}]}}'.encode()

    def get_running(self) -> list[QueueItem]:
        """Running items. Treat as read-only."""
        with self.mutex:
            return list(self.currently_running.values())

    def get_tasks_remaining(self) -> int:
        """Number of prompts that wait or run."""
        with self.mutex:
            return len(self._pending) + len(self.currently_running)

    def is_running(self, prompt_id: str) -> bool:
        """Whether this prompt is the running one, or one of them."""
        with self.mutex:
            return any(item[1] == prompt_id for item in self.currently_running.values())

    @property
    def queue(self) -> list[QueueItem]:
        """Pending items in order; a copy."""
        return self.get_current_queue()[1]

    @property
    def history(self) -> HistoryStore:
        """Finished prompts by id, oldest first."""
        return self._history

    def get_history(
        self,
        prompt_id: str | None = None,
        max_items: int | None = None,
        offset: int = -1,
        map_function: Callable[[dict[str, Any]], Any] | None = None,
    ) -> dict[str, Any]:
        """History entries by prompt id, oldest first.

        Args:
            prompt_id: Only this one; the answer is empty if there is none.
            max_items: At most so many: the newest ones, or those from ``offset`` on.
            offset: Counted from the oldest; negative means "the newest".
            map_function: Applied to each entry.
        """
        with self.mutex:
            names = [prompt_id] if prompt_id else self._history.page(max_items, offset)
        entries = self._history.read(names)
        return {name: map_function(e) for name, e in entries.items()} if map_function else entries

    def wipe_history(self) -> None:
        """Forgets every finished prompt."""
        with self.mutex:
            self._history.clear()
        self._history.erase(None)

    def delete_history_item(self, id_to_delete: str) -> None:
        """Forgets one finished prompt; an unknown id is ignored."""
        with self.mutex:
            self._history.delete(id_to_delete)
        self._history.erase([id_to_delete])
