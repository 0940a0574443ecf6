"""Results that outlive a prompt: what is kept, and when it goes.

A cache maps signatures (see ``signatures``) to results. Within a prompt the run itself holds every
result that may still be needed, so a policy can never make a node run twice in one prompt; the
policy decides what later prompts find.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

from comfy_execution.instances import ObjectCache
from comfy_execution.memory import estimate_bytes, free_memory_bytes


@dataclass(slots=True)
class CacheEntry:
    """The result of a node.

    Attributes:
        outputs: For each output the list of its values.
        ui: What it showed, by kind; None if nothing.
        children_ui: What nodes of its expanded graph showed, by the end of their ids: what
            follows the id of the posted node. Filled when the prompt ends.
    """

    outputs: list[list[Any]]
    ui: dict[str, list[Any]] | None = None
    children_ui: dict[str, dict[str, list[Any]]] = field(default_factory=dict)


class Ownership(NamedTuple):
    """Where a result comes from.

    Attributes:
        node_id: The node of the posted prompt that has the result, or whose expansion has it.
        is_expanded: Whether the node was made by expansion.
    """

    node_id: str
    is_expanded: bool


class CacheType(Enum):
    """Names of the policies, as command lines and packages know them."""

    CLASSIC = 0
    LRU = 1
    NONE = 2
    RAM_PRESSURE = 3


class ResultCache(Protocol):
    """A policy. One thread uses it.

    Attributes:
        keeps_run: Whether everything a prompt makes is kept at least until it ends, so that the run
            need not find out which results nobody can use any more.
        keeps_objects: Whether node instances are kept between prompts.
    """

    keeps_run: bool
    keeps_objects: bool

    def begin(
        self, signatures: Collection[str], needed: Collection[str], posted: Collection[str], /
    ) -> None:
        """A prompt starts.

        Args:
            signatures: Of the nodes that its outputs need.
            needed: Ids of these nodes.
            posted: Ids of all nodes in the prompt.
        """

    def get(self, signature: str, /) -> CacheEntry | None:
        """The result, if it is kept."""

    def has(self, signature: str, /) -> bool:
        """Whether a result is kept; asking, from any thread, does not count as using it."""

    def put(self, signature: str, entry: CacheEntry, owner: Ownership, /) -> None:
        """Offers a result to be kept."""

    def discard(self, signature: str, /) -> None:
        """Forgets a result that has proved unusable."""

    def end(self, expanded: Collection[str], /) -> None:
        """The prompt ended, however it did.

        Args:
            expanded: Ids of posted nodes that were expanded (again) in it.
        """

    def clear(self) -> None:
        """Forgets everything."""


@dataclass(slots=True)
class _Kept:
    entry: CacheEntry
    owner: Ownership
    used_in: int  # number of the prompt that made or used it last


class ClassicCache:
    """Keeps what belongs to the last prompt.

    A result stays while its node is part of the prompt unchanged. Results of an expanded graph
    stay while the expanding node is part of the prompt, changed or not, so that a loop of which
    one more turn is asked repeats none; those the next expansion does not use go with it.
    """

    keeps_run = True
    keeps_objects = True

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._prompt = 0
        self._live: frozenset[str] = frozenset()

    def begin(
        self, signatures: Collection[str], needed: Collection[str], posted: Collection[str]
    ) -> None:
        self._prompt += 1
        self._live = frozenset(signatures)
        for signature, kept in list(self._kept.items()):
            owner = kept.owner
            may_be_used = owner.is_expanded or owner.node_id not in needed
            if signature not in self._live and not (may_be_used and owner.node_id in posted):
                del self._kept[signature]

    def get(self, signature: str) -> CacheEntry | None:
        kept = self._kept.get(signature)
        if kept is None:
            return None
        kept.used_in = self._prompt
        return kept.entry

    def has(self, signature: str) -> bool:
        return signature in self._kept

    def put(self, signature: str, entry: CacheEntry, owner: Ownership) -> None:
        self._kept[signature] = _Kept(entry, owner, self._prompt)

    def discard(self, signature: str) -> None:
        self._kept.pop(signature, None)

    def end(self, expanded: Collection[str]) -> None:
        again = set(expanded)
        for signature, kept in list(self._kept.items()):
            stale = kept.used_in != self._prompt and signature not in self._live
            if stale and kept.owner.is_expanded and kept.owner.node_id in again:
                del self._kept[signature]

    def clear(self) -> None:
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


class LRUCache:
    """Keeps the ``capacity`` results used last, across prompts."""

    keeps_run = False
    keeps_objects = True

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"an LRU cache keeps at least one result, got capacity {capacity}")
        self.capacity = capacity
        self._kept: OrderedDict[str, CacheEntry] = OrderedDict()

    def begin(self, *_: Collection[str]) -> None:
        """Nothing to do: age alone decides."""

    def get(self, signature: str) -> CacheEntry | None:
        entry = self._kept.get(signature)
        if entry is not None:
            self._kept.move_to_end(signature)
        return entry

    def has(self, signature: str) -> bool:
        return signature in self._kept

    def put(self, signature: str, entry: CacheEntry, _owner: Ownership) -> None:
        self._kept[signature] = entry
        self._kept.move_to_end(signature)
        while len(self._kept) > self.capacity:
            self._kept.popitem(last=False)

    def discard(self, signature: str) -> None:
        self._kept.pop(signature, None)

    def end(self, expanded: Collection[str]) -> None:
        """Nothing to do: age alone decides."""

    def clear(self) -> None:
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


class NullCache:
    """Keeps nothing: every prompt runs every node."""

    keeps_run = False
    keeps_objects = False

    def begin(self, *_: Collection[str]) -> None:
        """Nothing to do."""

    def get(self, _signature: str) -> CacheEntry | None:
        return None

    def has(self, _signature: str) -> bool:
        return False

    def put(self, signature: str, entry: CacheEntry, owner: Ownership) -> None:
        """Forgets the result at once."""

    def discard(self, signature: str) -> None:
        """Nothing to do."""

    def end(self, expanded: Collection[str]) -> None:
        """Nothing to do."""

    def clear(self) -> None:
        """Nothing to do."""

    def __len__(self) -> int:
        return 0


class RAMPressureCache:
    """Keeps results across prompts until free memory drops below ``headroom_bytes``.

    Then those go first that no recent prompt used, among them the biggest.

    Args:
        headroom_bytes: Memory to leave free.
        free_bytes: Measures free memory.
        size_of: Estimates the bytes a result holds.
    """

    keeps_run = False
    keeps_objects = True

    def __init__(
        self,
        headroom_bytes: int,
        free_bytes: Callable[[], int],
        size_of: Callable[[CacheEntry], int],
    ) -> None:
        self.headroom_bytes = headroom_bytes
        self._free_bytes = free_bytes
        self._size_of = size_of
        self._kept: dict[str, _Kept] = {}
        self._prompt = 0
        self._next_check = 0.0

    def begin(self, *_: Collection[str]) -> None:
        self._prompt += 1
        self.relieve()

    def get(self, signature: str) -> CacheEntry | None:
        kept = self._kept.get(signature)
        if kept is None:
            return None
        kept.used_in = self._prompt
        return kept.entry

    def has(self, signature: str) -> bool:
        return signature in self._kept

    def put(self, signature: str, entry: CacheEntry, owner: Ownership) -> None:
        self._kept[signature] = _Kept(entry, owner, self._prompt)
        now = time.monotonic()
        if now >= self._next_check:  # measuring costs more than a trivial node
            self._next_check = now + 0.05
            self.relieve()

    def relieve(self) -> int:
        """Drops results while memory is short; returns how many went."""
        missing = self.headroom_bytes - self._free_bytes()
        if missing <= 0:
            return 0
        sizes = {signature: self._size_of(kept.entry) for signature, kept in self._kept.items()}
        order = sorted(sizes, key=lambda name: (self._kept[name].used_in, -sizes[name]))
        dropped = 0
        for signature in order:
            if missing <= 0:
                break
            del self._kept[signature]
            missing -= sizes[signature]
            dropped += 1
        return dropped

    def discard(self, signature: str) -> None:
        self._kept.pop(signature, None)

    def end(self, _expanded: Collection[str]) -> None:
        self.relieve()

    def clear(self) -> None:
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


def make_cache(
    policy: CacheType | str = CacheType.CLASSIC,
    *,
    lru_size: int = 0,
    ram_headroom_bytes: int = 4 << 30,
    free_bytes: Callable[[], int] | None = None,
) -> ResultCache:
    """Builds the cache of a policy.

    Args:
        policy: A member of CacheType or its name, in any case.
        lru_size: Results an LRU cache keeps.
        ram_headroom_bytes: Memory that RAM pressure leaves free.
        free_bytes: Measures free memory; the kernel's figure if None.
    """
    kind = CacheType[policy.upper()] if isinstance(policy, str) else policy
    if kind is CacheType.LRU:
        return LRUCache(lru_size)
    if kind is CacheType.NONE:
        return NullCache()
    if kind is CacheType.RAM_PRESSURE:
        return RAMPressureCache(
            ram_headroom_bytes,
            free_bytes or free_memory_bytes,
            lambda entry: estimate_bytes(entry.outputs),
        )
    return ClassicCache()


@dataclass
class CacheSet:
    """Results and instances together, as the executor owns them."""

    outputs: ResultCache
    objects: ObjectCache = field(default_factory=ObjectCache)

    def clear(self) -> None:
        """Forgets everything."""
        self.outputs.clear()
        self.objects.clear()
