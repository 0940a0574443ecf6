"""Finished prompts: bounded, compact, and readable page by page."""

from __future__ import annotations

import json
import logging
import sqlite3
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comfy_execution.items import ItemTexts, item_json
from comfy_execution.jobs import job_from_history
from comfy_execution.wire import dump_json

if TYPE_CHECKING:
    from comfy_execution.journal import Journal


logger = logging.getLogger(__name__)

MOST_BYTES = 512 << 20
"""Compressed bytes of all entries together; beyond, the oldest go, however few there are."""
MOST_REMOVED = 1000
MOST_REMOVED_BYTES = 16 << 20
"""Of prompts that were taken out of the queue the latest can be asked for, up to these limits."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished prompt, ready to be added.

    Attributes:
        fingerprint: Digest of the posted body.
        job: What job lists need.
        blob: The entry as compressed JSON; None if the journal has it.
        size_bytes: Of the blob.
    """

    prompt_id: str
    fingerprint: str
    job: dict[str, Any]
    blob: bytes | None
    size_bytes: int
    is_of_earlier_process: bool = False


class HistoryStore(Mapping[str, dict[str, Any]]):
    """Finished prompts by id, oldest first; the oldest go when they are too many or too much.

    Entries are kept as compressed JSON (in the journal, if there is one), so a long history costs
    little memory; what job lists need is kept beside them. Prompts that were taken out of the queue
    before they ran can be asked for by id for a while, so that whoever waits for one learns of it;
    they are in no list. The queue holds its lock around every call but ``prepare``, ``erase``,
    ``read`` and ``read_json``, which may wait for the disk.
    """

    def __init__(
        self, limit: int, journal: Journal | None = None, max_bytes: int = MOST_BYTES
    ) -> None:
        self.limit = limit
        self.max_bytes = max_bytes
        self._journal = journal
        self._entries: OrderedDict[str, Finished] = OrderedDict()
        self._size_bytes = 0
        self._removed = RemovedPrompts()
        if journal is not None:
            for prompt_id, fingerprint, blob in journal.load_history(limit):
                job = job_from_history(prompt_id, _without_temporary(_unpack(blob)))
                self.erase(self.add(Finished(prompt_id, fingerprint, job, None, len(blob), True)))

    def prepare(
        self,
        prompt_id: str,
        entry: dict[str, Any],
        fingerprint: str,
        texts: ItemTexts | None = None,
    ) -> Finished:
        """Packs an entry, and puts it into the journal; ``add`` is what makes it visible.

        Args:
            entry: Its ``prompt`` is a queue item without secrets.
            fingerprint: Digest of the posted body.
            texts: JSON of the large parts of the queue item; they take the place of these.
        """
        blob = zlib.compress(_entry_text(entry, texts).encode("utf-8"), 1)
        job = job_from_history(prompt_id, entry)
        is_on_disk = self._write(prompt_id, fingerprint, blob)
        kept = None if is_on_disk else blob
        return Finished(prompt_id, fingerprint, job, kept, len(blob))

    def add(self, finished: Finished) -> list[str]:
        """Stores a prompt as the newest one, in place of an older one with the same id.

        Returns:
            Ids of those that had to go, for ``erase``.
        """
        self.delete(finished.prompt_id)
        self._entries[finished.prompt_id] = finished
        self._size_bytes += finished.size_bytes
        surplus = []
        while len(self._entries) > max(self.limit, 0) or (
            self._size_bytes > self.max_bytes and len(self._entries) > 1
        ):
            surplus.append(next(iter(self._entries)))
            self.delete(surplus[-1])
        return surplus

    def add_removed(self, entry: dict[str, Any], texts: ItemTexts) -> None:
        """Remembers a prompt that was taken out of the queue; its id may be used again."""
        self._removed.add(entry, texts)

    def forget_removed(self, prompt_id: str) -> None:
        """The id is used again."""
        self._removed.pop(prompt_id)

    def _write(self, prompt_id: str, fingerprint: str, blob: bytes) -> bool:
        """Puts an entry into the journal; without one, or if that fails, memory keeps it."""
        if self._journal is None:
            return False
        try:
            self._journal.finish(prompt_id, fingerprint, blob)
        except sqlite3.Error:
            logger.exception("prompt %s is finished, but the journal cannot be written", prompt_id)
            return False
        return True

    def fingerprint(self, prompt_id: str) -> str | None:
        """Digest of the body that was posted under this id; None if the id is free."""
        stored = self._entries.get(prompt_id)
        return stored.fingerprint if stored is not None else None

    def size_bytes(self, prompt_id: str) -> int:
        """Of the compressed entry; 0 for an unknown id."""
        stored = self._entries.get(prompt_id)
        return stored.size_bytes if stored is not None else 0

    def jobs(self) -> list[dict[str, Any]]:
        """Job records of all entries, oldest first; treat as read-only."""
        return [stored.job for stored in self._entries.values()]

    def page(self, max_items: int | None, offset: int) -> list[str]:
        """Ids of a page: the newest ``max_items``, or so many from ``offset`` (oldest first)."""
        names = list(self._entries)
        if offset < 0:
            return names if max_items is None else names[max(0, len(names) - max_items) :]
        return names[offset:] if max_items is None else names[offset : offset + max_items]

    def read(self, prompt_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Full entries of the known ones among these ids, in the order given."""
        texts = ((prompt_id, self._text(prompt_id)) for prompt_id in prompt_ids)
        return {prompt_id: json.loads(text) for prompt_id, text in texts if text is not None}

    def read_json(
        self, prompt_ids: Sequence[str], max_bytes: int, *, prefer_last: bool = False
    ) -> bytes:
        """As ``read``, as JSON and without parsing; entries beyond ``max_bytes`` are left out.

        Args:
            prefer_last: Whether those at the beginning are left out, not those at the end. One is
                always there.
        """
        parts: list[bytes] = []
        left = max_bytes
        for prompt_id in reversed(prompt_ids) if prefer_last else prompt_ids:
            text = self._text(prompt_id)
            if text is None:
                continue
            part = f"{dump_json(prompt_id)}:{text}".encode()
            left -= len(part)
            if left < 0 and parts:
                break
            parts.append(part)
        return b"{" + b",".join(parts[::-1] if prefer_last else parts) + b"}"

    def _text(self, prompt_id: str) -> str | None:
        """JSON text of an entry; None for an unknown id."""
        stored = self._entries.get(prompt_id)
        if stored is None:
            return self._removed.text(prompt_id)
        blob = stored.blob
        if blob is None and self._journal is not None:
            blob = self._journal.read_history(prompt_id)
        if blob is None:
            return None
        text = zlib.decompress(blob).decode("utf-8")
        if stored.is_of_earlier_process and '"temp"' in text:
            return dump_json(_without_temporary(json.loads(text)))
        return text

    def delete(self, prompt_id: str) -> None:
        """Forgets one entry, or a removed prompt of this id; an unknown one is ignored."""
        self._removed.pop(prompt_id)
        finished = self._entries.pop(prompt_id, None)
        if finished is not None:
            self._size_bytes -= finished.size_bytes

    def clear(self) -> None:
        """Forgets all entries."""
        self._entries.clear()
        self._size_bytes = 0
        self._removed = RemovedPrompts()

    def erase(self, prompt_ids: Sequence[str] | None) -> None:
        """Takes forgotten entries out of the journal as well; None means all."""
        if self._journal is not None and prompt_ids != []:
            self._journal.delete_history(prompt_ids)

    def __getitem__(self, prompt_id: str) -> dict[str, Any]:
        return self.read([prompt_id])[prompt_id]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


class RemovedPrompts:
    """Prompts that were taken out of the queue: the latest ones, while they are not too large."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, tuple[dict[str, Any], ItemTexts]] = OrderedDict()
        self._size_bytes = 0

    def add(self, entry: dict[str, Any], texts: ItemTexts) -> None:
        """Remembers one; the oldest go."""
        prompt_id = str(entry["prompt"][1])
        self.pop(prompt_id)
        self._entries[prompt_id] = (entry, texts)
        self._size_bytes += sum(map(len, texts))
        while len(self._entries) > MOST_REMOVED or self._size_bytes > MOST_REMOVED_BYTES:
            self.pop(next(iter(self._entries)))

    def pop(self, prompt_id: str) -> bool:
        """Forgets one; says whether it was there."""
        found = self._entries.pop(prompt_id, None)
        if found is not None:
            self._size_bytes -= sum(map(len, found[1]))
        return found is not None

    def text(self, prompt_id: str) -> str | None:
        """JSON text of its entry; None for an unknown id."""
        found = self._entries.get(prompt_id)
        return _entry_text(*found) if found is not None else None


def _entry_text(entry: dict[str, Any], texts: ItemTexts | None) -> str:
    if texts is None:
        return dump_json(entry)
    item = item_json(entry["prompt"], texts)
    rest = dump_json({key: value for key, value in entry.items() if key != "prompt"})
    return f'{{"prompt":{item},{rest[1:]}'


def _unpack(blob: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(zlib.decompress(blob))
    return entry


def _without_temporary(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry after a restart, which empties the folder of temporary files."""
    outputs: dict[str, Any] = {}
    for node_id, output in (entry.get("outputs") or {}).items():
        kept = {}
        for kind, items in output.items():
            some = isinstance(items, list) and len(items) > 0
            left = [item for item in items if not _is_temporary(item)] if some else items
            if left or not some:
                kept[kind] = left
        outputs[node_id] = kept
    return entry | {"outputs": outputs}


def _is_temporary(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "temp" and "filename" in item
