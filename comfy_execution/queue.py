"""The prompt queue: who waits, who runs, what came out.

Every method may be called from any thread. Pending prompts are ordered by their number, equal
numbers by arrival. With a journal, an accepted prompt is on disk before ``submit`` returns; it may
start while the disk is busy, for a killed process leaves its prompt to the next one even then.
The journal is never written while the lock is held: whoever only looks does not wait for a disk.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from comfy_execution import events, items
from comfy_execution.admission import Admission, Outcome
from comfy_execution.history import MOST_REMOVED, HistoryStore
from comfy_execution.items import (
    CancelOutcome,
    Interrupt,
    ItemTexts,
    QueueItem,
    Submission,
    SubmissionKind,
    history_entry,
    public_item,
)
from comfy_execution.pending import Pending, PendingPrompts
from comfy_execution.queue_order import QueueOrder
from comfy_execution.queue_view import QueueView

if TYPE_CHECKING:
    from comfy_execution.journal import Journal

MAXIMUM_HISTORY_SIZE = 10000

Choice = Callable[[PendingPrompts], "Pending | None"]


class PromptQueue(QueueView, QueueOrder):
    """Pending, running and finished prompts."""

    ExecutionStatus = items.ExecutionStatus

    def __init__(
        self,
        sink: events.EventSink | None = None,
        *,
        interrupt: Interrupt | None = None,
        journal: Journal | None = None,
        history_limit: int = MAXIMUM_HISTORY_SIZE,
    ) -> None:
        self.sink: events.EventSink = sink or events.NullSink()
        self.interrupt_flag = interrupt
        self.mutex = threading.RLock()
        self.not_empty = threading.Condition(self.mutex)
        self.currently_running: dict[int, QueueItem] = {}
        self.flags: dict[str, Any] = {}
        self._journal = journal
        self._pending = PendingPrompts()
        self._history = HistoryStore(history_limit, journal)
        self._admission = Admission(self.mutex, self._history, journal, self._pending.next_arrival)
        self._fingerprints = self._admission.fingerprints
        self._texts: dict[int, ItemTexts] = {}
        self._put_back: set[str] = set()
        self._paused = False
        self._ordering = threading.Lock()
        self._interrupt_listeners: list[Callable[[str], None]] = []
        self._finished_listeners: list[Callable[[str], None]] = []

    def submit(self, item: Sequence[Any]) -> Submission:
        """Accepts a prompt, or says that its id is taken.

        Args:
            item: (number, prompt_id, prompt, extra_data, output ids[, secret extra data]).
        Returns:
            ACCEPTED; DUPLICATE when a prompt with this id and the same body is known (nothing is
            queued, the first job answers); CONFLICT when the id belongs to another body.
        """
        outcome = self.submit_all([item])[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def submit_all(self, given: Sequence[Sequence[Any]]) -> list[Outcome]:
        """Submits prompts that arrive together; they share one flush of the disk.

        Returns:
            For each item what ``submit`` returns or raises.
        """
        outcomes, accepted = self._admission.admit(given)
        if accepted:
            with self.mutex:
                for one in accepted:
                    self._pending.add(one.item, one.texts, one.arrival)
                self._changed()
                self.not_empty.notify(len(accepted))
        try:
            if self._journal is not None:
                self._journal.flush()
        except OSError as error:
            for one in accepted:  # it may run already, or have ended
                self.cancel(one.item[1])
            return [
                items.NotStoredError(o.prompt_id, error) if isinstance(o, Submission) else o
                for o in outcomes
            ]
        return outcomes

    def put(self, item: Sequence[Any]) -> None:
        """Queues an item, as node packages do.

        Raises:
            items.PromptIdConflictError: a prompt with this id is known already.
        """
        submission = self.submit(item)
        if submission.kind is not SubmissionKind.ACCEPTED:
            raise items.PromptIdConflictError(submission.prompt_id)

    def restore(self, entries: Sequence[tuple[QueueItem, str]], *, paused: bool = False) -> None:
        """Takes over (item, fingerprint) pairs that the journal kept, in this order."""
        with self._rearranging():
            self._fingerprints.update((item[1], fingerprint) for item, fingerprint in entries)
            self._pending.add_in_order([item for item, _ in entries])
            self._paused = paused
        self.wake()

    def next_number(self) -> int:
        """A number that puts a prompt after all that wait; where counting goes on at start."""
        with self.mutex:
            return math.floor(self._pending.highest_number()) + 1

    def record_lost(self, item: QueueItem, fingerprint: str, status: items.ExecutionStatus) -> None:
        """Puts a prompt that a previous process did not finish into the history."""
        entry = history_entry(public_item(item), {"meta": {}}, status)
        finished = self._history.prepare(item[1], entry, fingerprint)
        with self.mutex:
            surplus = self._history.add(finished)
        self._history.erase(surplus)

    def get(
        self, timeout: float | None = None, choose: Choice | None = None
    ) -> tuple[QueueItem, int] | None:
        """Waits for a prompt and hands it out; it counts as running from here on.

        A cancellation that is still pending is dropped: it was meant for an earlier prompt.

        Args:
            timeout: Seconds to wait; None waits for ever.
            choose: Picks among those that wait, in order and at least one; None for none of them
                now, until ``wake``. It is called under the lock. The default takes the first.
        Returns:
            The item and its key for ``task_done``; None after the timeout or a flag was set.
        """
        with self.not_empty:
            entry = self._next(choose)
            while entry is None:
                self.not_empty.wait(timeout)
                entry = self._next(choose)
                if timeout is not None and entry is None:
                    return None
            self._pending.remove([entry])
            item, key = entry.item, self._pending.next_arrival()
            self.currently_running[key] = item
            self._texts[key] = entry.texts
            if self.interrupt_flag is not None:
                self.interrupt_flag.clear()
        if self._journal is not None:
            self._journal.mark_running(item[1])
        with self.mutex:
            self._changed()
        return item, key

    def _next(self, choose: Choice | None) -> Pending | None:
        """The prompt to hand out now, if there is one; the lock is held."""
        if self._paused or not self._pending:
            return None
        return choose(self._pending) if choose is not None else self._pending.first()

    def task_done(
        self,
        item_id: int,
        history_result: Mapping[str, Any],
        status: items.ExecutionStatus | None = None,
        process_item: Callable[[QueueItem], Sequence[Any]] | None = None,
        announce: Callable[[], None] | None = None,
    ) -> None:
        """Moves a running prompt to the history, where it is on record before anybody sees it.

        Args:
            item_id: The key that ``get`` gave.
            history_result: ``outputs``, ``meta`` and further keys of the history entry.
            status: How it ended.
            process_item: What to keep of the item; the default leaves out secrets.
            announce: Says that it has ended, once the history has it and before the queue says
                that it is shorter.
        """
        with self.mutex:
            item, texts = self.currently_running[item_id], self._texts[item_id]
            fingerprint = self._fingerprints.get(item[1], "")
        kept = process_item(item) if process_item is not None else public_item(item)
        entry = history_entry(kept, history_result, status)
        is_whole = kept[2] is item[2] and kept[3] is item[3]
        finished = self._history.prepare(item[1], entry, fingerprint, texts if is_whole else None)
        with self.mutex:
            del self.currently_running[item_id], self._texts[item_id]
            self._fingerprints.pop(item[1], None)
            self._put_back.discard(item[1])
            surplus = self._history.add(finished)
            if announce is not None:
                announce()
            self._changed()
        self._history.erase(surplus)
        self._announce_finished(item[1])

    def leave_to_next_process(self, item_id: int) -> bool:
        """Takes a running prompt out, so that it waits in the journal for the next process.

        Returns:
            False, with nothing done, if there is no journal or somebody stopped the prompt.
        """
        prompt_id = self.currently_running[item_id][1]
        if self._journal is None or not self._journal.mark_waiting(prompt_id):
            return False
        with self.mutex:
            del self.currently_running[item_id], self._texts[item_id]
        return True

    def put_back(self, item_id: int) -> bool:
        """Has a running prompt start again, first of all: what ran it has died under it.

        Returns:
            False, with nothing done, if it has been put back before or somebody stopped it.
        """
        prompt_id = self.currently_running[item_id][1]
        if prompt_id in self._put_back:
            return False
        if self._journal is not None and not self._journal.may_start(prompt_id):
            return False
        with self.mutex:
            item, texts = self.currently_running[item_id], self._texts[item_id]
            self._put_back.add(prompt_id)
            del self.currently_running[item_id], self._texts[item_id]
            self._pending.add_first(item, texts)
            self._changed()
        self.wake()
        return True

    def set_flag(self, name: str, data: Any) -> None:
        """Asks the worker for something between prompts: ``unload_models``, ``free_memory``."""
        with self.mutex:
            self.flags[name] = data
        self.wake()

    def get_flags(self, reset: bool = True) -> dict[str, Any]:
        """Flags set so far; reading clears them unless told otherwise."""
        with self.mutex:
            flags, self.flags = self.flags, {} if reset else dict(self.flags)
        return flags

    def wake(self) -> None:
        """Lets a waiting ``get`` look again, and one with a timeout return at once."""
        with self.mutex:
            self.not_empty.notify_all()

    def wipe_queue(self) -> None:
        """Drops every pending prompt."""
        self._drop(lambda: self._pending)

    def delete_queue_item(self, function: Callable[[QueueItem], bool]) -> bool:
        """Drops the first pending item for which function holds; says whether there was one."""

        def choose() -> Iterable[Pending]:
            return [entry for entry in self._pending if function(entry.item)][:1]

        return bool(self._drop(choose))

    def delete_items(
        self, prompt_ids: Iterable[str], is_allowed: Callable[[QueueItem], bool] = lambda _: True
    ) -> int:
        """Drops the pending prompts among these that may be dropped; returns their number."""

        def choose() -> Iterable[Pending]:
            found = map(self._pending.find, dict.fromkeys(prompt_ids))
            return [entry for entry in found if entry and is_allowed(entry.item)]

        return len(self._drop(choose))

    def interrupt(self, prompt_id: str | None = None, *, for_good: bool = True) -> bool:
        """Stops a running prompt, if it is the named one; None means whatever runs.

        Checking and setting happen under one lock, so a later prompt is never hit.

        Args:
            for_good: Whether it must not run again should the process end before the prompt does.
        """
        hit = self._stop_running(prompt_id)
        self._interrupted(hit, for_good)
        return bool(hit)

    def cancel(self, prompt_id: str) -> CancelOutcome:
        """Stops or removes one job, wherever it is."""
        with self.mutex:
            hit = self._stop_running(prompt_id)
            entry = self._pending.find(prompt_id) if not hit else None
            dropped = self._take_out([entry]) if entry is not None else []
        self._interrupted(hit, for_good=True)
        self._forget(dropped)
        if hit:
            return CancelOutcome.INTERRUPTED
        if dropped:
            return CancelOutcome.REMOVED
        return CancelOutcome.FINISHED if prompt_id in self._history else CancelOutcome.UNKNOWN

    def _stop_running(self, prompt_id: str | None) -> list[str]:
        """Sets the flag if this prompt runs; returns the ids of those that were hit."""
        with self.mutex:
            running = [item[1] for item in self.currently_running.values()]
            hit = [name for name in running if prompt_id in (None, name)]
            if hit and self.interrupt_flag is not None:
                self.interrupt_flag.set()
        return hit

    def _interrupted(self, prompt_ids: Sequence[str], for_good: bool) -> None:
        """Follows up that the flag was set for prompts; the lock is not held."""
        for prompt_id in prompt_ids:
            for listener in list(self._interrupt_listeners):
                listener(prompt_id)
            if for_good and self._journal is not None:
                self._journal.mark_stopped(prompt_id)

    def _drop(self, choose: Callable[[], Iterable[Pending]]) -> list[str]:
        """Drops the pending prompts that are chosen under the lock; returns their ids."""
        with self.mutex:
            dropped = self._take_out(choose())
        self._forget(dropped)
        return dropped

    def _take_out(self, entries: Iterable[Pending]) -> list[str]:
        """Takes pending prompts out; by their ids, those who wait for them find them cancelled."""
        dropped = list(entries)
        if not dropped:
            return []
        for entry in dropped[-MOST_REMOVED:]:
            status = items.cancelled_status(entry.prompt_id)
            cancelled = history_entry(public_item(entry.item), {"meta": {}}, status)
            self._history.add_removed(cancelled, entry.texts)
        names = self._pending.remove(dropped)
        self._changed()
        return names

    def _forget(self, prompt_ids: Sequence[str]) -> None:
        """Forgets prompts that were taken out; from here on their ids are free."""
        if self._journal is not None and prompt_ids:
            self._journal.forget(prompt_ids)
        with self.mutex:
            for prompt_id in prompt_ids:
                self._fingerprints.pop(prompt_id, None)
                self._put_back.discard(prompt_id)
        self._announce_finished(*prompt_ids)

    def add_interrupt_listener(self, listener: Callable[[str], None]) -> None:
        """Calls listener(prompt_id) after a running prompt was told to stop."""
        self._interrupt_listeners.append(listener)

    def add_finished_listener(self, listener: Callable[[str], None]) -> None:
        """Calls listener(prompt_id) once the history can tell how a prompt has ended."""
        self._finished_listeners.append(listener)

    def _changed(self) -> None:
        self.sink.publish(events.Status(len(self._pending) + len(self.currently_running)))

    def _announce_finished(self, *prompt_ids: str) -> None:
        for prompt_id, listener in itertools.product(prompt_ids, list(self._finished_listeners)):
            listener(prompt_id)
