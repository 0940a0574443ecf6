"""Prompts that wait, in the order they will run."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from comfy_execution.items import ItemTexts, QueueItem


@dataclass(order=True, slots=True)
class Pending:
    """A waiting prompt.

    Attributes:
        order: Its number (smaller runs first) and its arrival, which decides among equals.
        item: The queue item.
        texts: JSON of its parts as accepted.
    """

    order: tuple[float, int]
    item: QueueItem = field(compare=False)
    texts: ItemTexts = field(compare=False)

    @property
    def prompt_id(self) -> str:
        """Id of the prompt."""
        return self.item[1]


class PendingPrompts:
    """Waiting prompts, always in order. Not thread-safe: the queue holds its lock."""

    def __init__(self) -> None:
        self._entries: list[Pending] = []
        self._by_id: dict[str, Pending] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Pending]:
        return iter(list(self._entries))

    def next_arrival(self) -> int:
        """A number greater than every one given before."""
        self._arrivals += 1
        return self._arrivals

    def add(self, item: QueueItem, texts: ItemTexts, arrival: int) -> None:
        """Puts a prompt at its place."""
        self._insert(Pending((float(item[0]), arrival), item, texts))

    def add_in_order(self, prompts: Sequence[QueueItem]) -> None:
        """Puts prompts in, in this very order whatever their numbers are."""
        numbers = [float(item[0]) for item in prompts]
        for place in range(len(numbers) - 2, -1, -1):
            numbers[place] = min(numbers[place], numbers[place + 1])
        for number, item in zip(numbers, prompts):
            order = (number, self.next_arrival())
            self._insert(Pending(order, item, ItemTexts.of(item)))

    def highest_number(self) -> float:
        """The largest number among the waiting prompts; -1 if none waits."""
        return max((entry.item[0] for entry in self._entries), default=-1)

    def add_first(self, item: QueueItem, texts: ItemTexts) -> None:
        """Puts a prompt before all others, whatever its number is."""
        lowest = min((entry.order[0] for entry in self._entries), default=float(item[0]))
        order = (min(lowest, float(item[0])), -self.next_arrival())
        self._insert(Pending(order, item, texts))

    def first(self) -> Pending:
        """The prompt whose turn is next; there must be one."""
        return self._entries[0]

    def find(self, prompt_id: str) -> Pending | None:
        """The waiting prompt with this id."""
        return self._by_id.get(prompt_id)

    def remove(self, entries: Iterable[Pending]) -> list[str]:
        """Takes prompts out; returns their ids."""
        gone = {entry.prompt_id: entry for entry in entries}
        for prompt_id in gone:
            del self._by_id[prompt_id]
        if len(gone) == 1:
            (entry,) = gone.values()
            del self._entries[bisect.bisect_left(self._entries, entry)]  # no two have one order
        else:
            self._entries = [entry for entry in self._entries if entry.prompt_id not in gone]
        return list(gone)

    def reorder(self, prompt_ids: Sequence[str]) -> None:
        """Puts the named prompts first, in this order; the rest keep theirs.

        The numbers stay where they are: each place keeps its number, so later prompts still find
        theirs behind the reordered ones.
        """
        wanted = {prompt_id: place for place, prompt_id in enumerate(prompt_ids)}
        numbers = [entry.order[0] for entry in self._entries]
        ordered = sorted(self._entries, key=lambda e: wanted.get(e.prompt_id, len(wanted)))
        self._entries = [self._renumbered(entry, number) for number, entry in zip(numbers, ordered)]
        self._by_id = {entry.prompt_id: entry for entry in self._entries}

    def set_number(self, entry: Pending, number: float) -> None:
        """Gives a waiting prompt another number, after those that have the same."""
        self.remove([entry])
        self._insert(self._renumbered(entry, number))

    def _insert(self, entry: Pending) -> None:
        bisect.insort(self._entries, entry)
        self._by_id[entry.prompt_id] = entry

    def _renumbered(self, entry: Pending, number: float) -> Pending:
        number = int(number) if float(number).is_integer() else float(number)
        item: QueueItem = (number, *entry.item[1:])
        return Pending((float(number), self.next_arrival()), item, entry.texts)
