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

from comfy_execution.jobs import job_from_history
from comfy_execution.wire import dump_json

if TYPE_CHECKING:
    from comfy_execution.journal import Journal


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Stored:
    fingerprint: str
    job: dict[str, Any]
    blob: bytes | None  # None: the journal has it
    is_of_earlier_process: bool = False


class HistoryStore(Mapping[str, dict[str, Any]]):
    """Finished prompts by id, oldest first; the oldest go when there are more than ``limit``.

    Entries are kept as compressed JSON (in the journal, if there is one), so a long history costs
    little memory; what job lists need is kept beside them. The queue holds its lock around every
    call but ``read`` and ``read_json``, which any thread may call at any time.
    """

    def __init__(self, limit: int, journal: Journal | None = None) -> None:
        self.limit = limit
        self._journal = journal
        self._entries: OrderedDict[str, _Stored] = OrderedDict()
        if journal is not None:
            for prompt_id, fingerprint, blob in journal.load_history(limit):
                job = job_from_history(prompt_id, _without_temporary(_unpack(blob)))
                self._entries[prompt_id] = _Stored(fingerprint, job, None, True)

    def add(
        self,
        prompt_id: str,
        entry: dict[str, Any],
        fingerprint: str,
        prompt_text: str | None = None,
    ) -> None:
        """Stores an entry as the newest one, in place of an older one with the same id.

        Args:
            entry: Its ``prompt`` is a queue item without secrets.
            fingerprint: Digest of the posted body.
            prompt_text: JSON text that takes the place of the prompt in the queue item.
        """
        blob = zlib.compress(_entry_text(entry, prompt_text).encode("utf-8"), 1)
        job = job_from_history(prompt_id, entry)
        self._entries.pop(prompt_id, None)
        is_on_disk = self._write(prompt_id, fingerprint, blob)
        self._entries[prompt_id] = _Stored(fingerprint, job, None if is_on_disk else blob)
        while len(self._entries) > self.limit:
            self.delete(next(iter(self._entries)))

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
        """Digest of the body that was posted under this id; None for an unknown id."""
        stored = self._entries.get(prompt_id)
        return stored.fingerprint if stored is not None else None

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
            return None
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
        """Forgets one entry; an unknown id is ignored."""
        if self._entries.pop(prompt_id, None) is not None and self._journal is not None:
            self._journal.delete_history([prompt_id])

    def clear(self) -> None:
        """Forgets all entries."""
        self._entries.clear()
        if self._journal is not None:
            self._journal.delete_history(None)

    def __getitem__(self, prompt_id: str) -> dict[str, Any]:
        return self.read([prompt_id])[prompt_id]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(self._entries)


def _entry_text(entry: dict[str, Any], prompt_text: str | None) -> str:
    if prompt_text is None:
        return dump_json(entry)
    number, prompt_id, _, *others = entry["prompt"]
    number, prompt_id, *others = map(dump_json, (number, prompt_id, *others))
    item = ",".join([number, prompt_id, prompt_text, *others])
    rest = dump_json({key: value for key, value in entry.items() if key != "prompt"})
    return f'{{"prompt":[{item}],{rest[1:]}'


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
