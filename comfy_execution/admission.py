"""The way into the queue: is a prompt's id free, and is the prompt on disk?"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from comfy_execution import items
from comfy_execution.items import Accepted, QueueItem, Submission, SubmissionKind

if TYPE_CHECKING:
    from comfy_execution.history import HistoryStore
    from comfy_execution.journal import Journal

Outcome = Submission | Exception
"""What became of a submitted prompt; an exception is for the one who submitted it."""


class Admission:
    """Reserves ids and writes prompts to the journal, if there is one.

    Attributes:
        fingerprints: Digest of the body of each prompt that is on its way, waits or runs, by id.
    """

    def __init__(
        self,
        lock: threading.RLock,
        history: HistoryStore,
        journal: Journal | None,
        next_arrival: Callable[[], int],
    ) -> None:
        """`lock` guards the fingerprints, the history and `next_arrival`."""
        self.fingerprints: dict[str, str] = {}
        self._lock = lock
        self._history = history
        self._journal = journal
        self._next_arrival = next_arrival

    def admit(self, given: Sequence[Sequence[Any]]) -> tuple[list[Outcome], list[Accepted]]:
        """Takes in queue items that arrive together, with one statement of the journal.

        Returns:
            The outcome for each item, and those that may now wait in the queue.
        """
        outcomes: list[Outcome] = []
        reserved: dict[int, Accepted] = {}  # by place among the given items
        for place, item in enumerate(given):
            outcome = self._reserve(item)
            if isinstance(outcome, Accepted):
                reserved[place] = outcome
                outcome = Submission(SubmissionKind.ACCEPTED, outcome.item[1], outcome.item[0])
            outcomes.append(outcome)
        accepted = []
        for place, failure in zip(reserved, self._write(list(reserved.values()))):
            if failure is None:
                accepted.append(reserved[place])
            elif isinstance(failure, sqlite3.Error):
                outcomes[place] = items.NotStoredError(reserved[place].item[1], failure)
            else:
                outcomes[place] = failure
        return outcomes, accepted

    def _reserve(self, given: Sequence[Any]) -> Outcome | Accepted:
        """Takes the prompt's id and place; a Submission says that the id belongs to another."""
        try:
            item: QueueItem = items.normalize_item(given)
            texts, fingerprint = items.texts_and_fingerprint(item)
        except Exception as error:  # noqa: BLE001 - told to whoever gave this item, not the others
            return error
        number, prompt_id = item[0], item[1]
        with self._lock:
            known = self.fingerprints.get(prompt_id) or self._history.fingerprint(prompt_id)
            if known is not None:
                kind = SubmissionKind.DUPLICATE if known == fingerprint else SubmissionKind.CONFLICT
                return Submission(kind, prompt_id, number)
            self.fingerprints[prompt_id] = fingerprint
            self._history.forget_removed(prompt_id)
            return Accepted(item, texts, fingerprint, self._next_arrival())

    def _write(self, prompts: Sequence[Accepted]) -> Sequence[Exception | None]:
        """Has the journal write prompts; the ids of those it cannot write are free again."""
        if self._journal is None or not prompts:
            return [None] * len(prompts)
        failures: Sequence[Exception | None]
        try:
            failures = self._journal.enqueue(prompts)
        except Exception as error:  # noqa: BLE001 - told to each who submitted
            failures = [error] * len(prompts)
        with self._lock:
            for prompt, failure in zip(prompts, failures):
                if failure is not None:
                    self.fingerprints.pop(prompt.item[1], None)
        return failures
