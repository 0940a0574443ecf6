"""The durable queue: SQLite in write-ahead mode, so that no accepted prompt is ever lost.

Enqueueing is synced to disk before it returns. Everything else survives a killed process at once
and a power failure shortly after. Secrets of a prompt are never written.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from comfy_execution.items import Accepted, QueueItem
from comfy_execution.wire import dump_json

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""How often a prompt may be started: once, and once more if the process died under it."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS queue (
    prompt_id TEXT PRIMARY KEY,
    number REAL NOT NULL,
    arrival INTEGER NOT NULL,
    prompt TEXT NOT NULL,
    extra_data TEXT NOT NULL,
    outputs TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS history (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    prompt_id TEXT NOT NULL UNIQUE,
    fingerprint TEXT NOT NULL,
    entry BLOB NOT NULL
);
"""


_COLUMNS = "prompt_id, number, arrival, prompt, extra_data, outputs, fingerprint"
_PLACES = "(?, ?, ?, ?, ?, ?, ?)"


class JournalInUseError(RuntimeError):
    """Another running server owns the journal file."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a previous process left behind.

    Attributes:
        pending: Prompts to run, in order, with the fingerprint of their bodies. One that was
            running comes first.
        retried: Ids among them that had been started already.
        abandoned: Prompts that were running and may not be started again.
    """

    pending: list[tuple[QueueItem, str]]
    retried: list[str]
    abandoned: list[tuple[QueueItem, str]]


class Journal:
    """One SQLite file, owned by one process. Methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the journal.

        Raises:
            JournalInUseError: another process has it open.
            sqlite3.DatabaseError: the file is not a journal.
        """
        self.path = path
        self._lock = threading.Lock()
        self._owner = _claim(path)
        self._db = _connect(path, synchronous="NORMAL")
        self._db.executescript(_SCHEMA)
        self._synced = _connect(path, synchronous="FULL")  # a statement returns when it is on disk

    def close(self) -> None:
        """Closes the file and lets another process have it."""
        with self._lock:
            self._synced.close()
            self._db.close()
            self._owner.close()

    # --- queue --------------------------------------------------------------------------------

    def enqueue(self, prompts: Sequence[Accepted]) -> list[Exception | None]:
        """Writes accepted prompts with one flush; they are on disk when this returns.

        Returns:
            For each prompt None, or why it could not be written.
        """
        rows = [_row(prompt) for prompt in prompts]
        with self._lock:
            whole = self._insert(rows)
            if whole is None or len(rows) == 1:
                return [whole] * len(rows)
            return [self._insert([row]) for row in rows]  # one is at fault: spare the others

    def _insert(self, rows: Sequence[tuple[object, ...]]) -> Exception | None:
        """Inserts all rows or none.

        One statement does it: each one gives up the interpreter, and under load getting it back
        takes longer than the disk.
        """
        values = ", ".join([_PLACES] * len(rows))
        try:
            self._synced.execute(
                f"INSERT INTO queue ({_COLUMNS}) VALUES {values}", [v for row in rows for v in row]
            )
        except (sqlite3.Error, ValueError) as error:  # ValueError: half of a surrogate pair
            return error
        return None

    def mark_running(self, prompt_id: str) -> None:
        """Counts a start of the prompt; a disk that refuses does not keep it from running."""
        try:
            self._write(
                "UPDATE queue SET attempts = attempts + 1 WHERE prompt_id = ?", (prompt_id,)
            )
        except sqlite3.Error:
            logger.exception("the start of prompt %s could not be written", prompt_id)

    def forget(self, prompt_ids: Iterable[str]) -> None:
        """Removes prompts that were taken out of the queue."""
        with self._lock:
            self._db.executemany(
                "DELETE FROM queue WHERE prompt_id = ?", [(name,) for name in prompt_ids]
            )

    def set_order(self, order: Iterable[tuple[str, float, int]]) -> None:
        """Writes (prompt_id, number, arrival) of pending prompts after a reordering."""
        with self._lock, self._db:
            self._db.execute("BEGIN")
            self._db.executemany(
                "UPDATE queue SET number = ?2, arrival = ?3 WHERE prompt_id = ?1", list(order)
            )

    def recover(self, *, retry_running: bool = True) -> Recovered:
        """Reads what the previous process left; nothing is changed.

        Args:
            retry_running: Whether a prompt that was running may be started a second time. False
                after a crash in native code, which would only crash again.
        """
        with self._lock:
            rows = self._db.execute(
                "SELECT number, prompt_id, prompt, extra_data, outputs, fingerprint, attempts "
                "FROM queue ORDER BY attempts = 0, number, arrival"
            ).fetchall()
        recovered = Recovered([], [], [])
        limit = MAX_ATTEMPTS if retry_running else 1
        for number, prompt_id, prompt, extra_data, outputs, fingerprint, attempts in rows:
            item: QueueItem = (
                int(number) if number.is_integer() else number,
                prompt_id,
                json.loads(prompt),
                json.loads(extra_data),
                json.loads(outputs),
                {},
            )
            if attempts >= limit:
                recovered.abandoned.append((item, fingerprint))
                continue
            recovered.pending.append((item, fingerprint))
            if attempts:
                recovered.retried.append(prompt_id)
        return recovered

    def clear_queue(self) -> None:
        """Removes every prompt that waits or was running."""
        self._write("DELETE FROM queue", ())

    # --- history ------------------------------------------------------------------------------

    def finish(self, prompt_id: str, fingerprint: str, entry: bytes) -> None:
        """Moves a prompt from the queue to the history in one step."""
        with self._lock, self._db:
            self._db.execute("BEGIN")
            self._db.execute("DELETE FROM queue WHERE prompt_id = ?", (prompt_id,))
            self._db.execute("DELETE FROM history WHERE prompt_id = ?", (prompt_id,))
            self._db.execute(
                "INSERT INTO history (prompt_id, fingerprint, entry) VALUES (?, ?, ?)",
                (prompt_id, fingerprint, entry),
            )

    def load_history(self, limit: int) -> Iterable[tuple[str, str, bytes]]:
        """The newest entries as (prompt_id, fingerprint, entry), oldest first; drops the others."""
        with self._lock:
            self._db.execute(
                "DELETE FROM history WHERE sequence NOT IN "
                "(SELECT sequence FROM history ORDER BY sequence DESC LIMIT ?)",
                (limit,),
            )
            names = self._db.execute("SELECT prompt_id FROM history ORDER BY sequence").fetchall()
        for (prompt_id,) in names:
            with self._lock:
                row = self._db.execute(
                    "SELECT fingerprint, entry FROM history WHERE prompt_id = ?", (prompt_id,)
                ).fetchone()
            if row is not None:
                yield prompt_id, row[0], row[1]

    def read_history(self, prompt_id: str) -> bytes | None:
        """One entry, as it was given to ``finish``."""
        with self._lock:
            row = self._db.execute(
                "SELECT entry FROM history WHERE prompt_id = ?", (prompt_id,)
            ).fetchone()
        return row[0] if row is not None else None

    def delete_history(self, prompt_ids: Sequence[str] | None) -> None:
        """Removes the named entries; None removes all."""
        if prompt_ids is None:
            self._write("DELETE FROM history", ())
            return
        with self._lock:
            self._db.executemany(
                "DELETE FROM history WHERE prompt_id = ?", [(name,) for name in prompt_ids]
            )

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        with self._lock:
            self._db.execute(statement, values)


def _row(prompt: Accepted) -> tuple[object, ...]:
    """What is written of a prompt, in the order of `_COLUMNS`."""
    number, prompt_id, _, extra_data, outputs, _ = prompt.item
    return (
        prompt_id,
        float(number),
        prompt.arrival,
        prompt.prompt_text,
        dump_json(extra_data),
        dump_json(outputs),
        prompt.fingerprint,
    )


def _connect(path: Path, *, synchronous: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10.0)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute(f"PRAGMA synchronous={synchronous}")
    return db


def _claim(path: Path) -> IO[bytes]:
    """Locks a file beside the journal for the life of this process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = open(f"{path}.lock", "ab")  # noqa: SIM115 - stays open as long as the journal does
    try:
        _lock_file(handle)
    except OSError as error:
        handle.close()
        raise JournalInUseError(
            f"{path} is in use by another running server; stop it, or give this one another "
            "user directory"
        ) from error
    return handle


def _lock_file(handle: IO[bytes]) -> None:
    """Takes an exclusive lock without waiting; the system drops it when the process ends."""
    if os.name == "nt":
        import msvcrt

        msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
