"""What may be changed about the order of the queue: held, resumed, rearranged."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from comfy_execution.pending import PendingPrompts

if TYPE_CHECKING:
    from comfy_execution.journal import Journal


class QueueOrder(ABC):
    """The part of the queue that holds and rearranges what waits; the queue makes the members."""

    mutex: threading.RLock
    _journal: Journal | None
    _pending: PendingPrompts
    _paused: bool
    _ordering: threading.Lock  # so that the journal gets one order after the other

    @abstractmethod
    def wake(self) -> None:
        """Lets a waiting ``get`` look again."""

    @abstractmethod
    def _changed(self) -> None:
        """Tells everybody how many prompts there are."""

    @property
    def paused(self) -> bool:
        """Whether pending prompts are held back."""
        return self._paused

    def pause(self) -> None:
        """Holds back pending prompts; the running one goes on."""
        with self.mutex:
            self._paused = True

    def resume(self) -> None:
        """Lets pending prompts run again."""
        with self.mutex:
            self._paused = False
        self.wake()

    def reorder(self, prompt_ids: Sequence[str]) -> list[str]:
        """Puts the named pending prompts first, in this order; the rest keep theirs.

        Returns:
            All pending ids in their new order. Ids that are not pending are ignored.
        """
        with self._rearranging():
            self._pending.reorder(prompt_ids)
            return [entry.prompt_id for entry in self._pending]

    def set_number(self, prompt_id: str, number: float) -> bool:
        """Gives a pending prompt another position value; smaller runs first."""
        with self._rearranging():
            entry = self._pending.find(prompt_id)
            if entry is not None:
                self._pending.set_number(entry, number)
        return entry is not None

    @contextmanager
    def _rearranging(self) -> Iterator[None]:
        """Holds the lock while the order changes, then tells everybody and the journal."""
        with self._ordering:
            with self.mutex:
                yield
                order = [(entry.prompt_id, *entry.order) for entry in self._pending]
                self._changed()
            if self._journal is not None:
                self._journal.set_order(order)
