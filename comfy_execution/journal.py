"""The durable queue: SQLite in write-ahead mode, so that no accepted prompt is ever lost.

Whatever is written survives a killed process at once, and a power failure after the next ``flush``:
the write-ahead log holds all of it, so one flush of that file serves everybody who waits for one.
Secrets of a prompt are never written.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from comfy_execution.items import Accepted, QueueItem
from comfy_execution.journal_lock import JournalError, JournalInUseError, claim
from comfy_execution.wire import dump_json

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""How often a prompt may be started: once, and once more if the process died under it."""

_PREDECESSOR_S = 15.0  # a process that holds devices may take this long to end when killed
_STOPPED = 1000  # in place of the number of starts: somebody stopped it, so it must not come back

_CHECKPOINT_EVERY = 64  # calls of enqueue between two moves of the log into the file
_LATEST_CHECKPOINT = 8000  # pages of the log from which on any statement may have to do it

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
CREATE TRIGGER IF NOT EXISTS finished AFTER INSERT ON history BEGIN
    DELETE FROM queue WHERE prompt_id = NEW.prompt_id;
END;
"""


_COLUMNS = "prompt_id, number, arrival, prompt, extra_data, outputs, fingerprint"
_PLACES = "(?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a previous process left behind.

    Attributes:
        pending: Prompts to run, in order, with the fingerprint of their bodies. One that was
            running comes first.
        retried: Ids among them that had been started already.
        abandoned: Prompts that were running and may not be started again.
        stopped: Prompts that somebody had stopped when the process ended.
    """

    pending: list[tuple[QueueItem, str]]
    retried: list[str]
    abandoned: list[tuple[QueueItem, str]]
    stopped: list[tuple[QueueItem, str]]


class Journal:
    """One SQLite file, owned by one process. Methods may be called from any thread."""

    def __init__(self, path: Path, port: int = 0) -> None:
        """Opens or creates the journal.

        Args:
            port: Where the process serves; others that want the file can read it.
        Raises:
            JournalInUseError: another process has it open.
            sqlite3.DatabaseError: the file is not a journal.
        """
        self.path = path
        self._lock = threading.Lock()
        self._owner = claim(path, port)
        try:
            self._db = _connect(path)
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA wal_autocheckpoint={_LATEST_CHECKPOINT}")
            self._reader, self._keeper = _connect(path), _connect(path)
            self._log = _open_log(self._db, path)
        except BaseException:
            self._owner.close()
            raise
        self._reading, self._flushing = threading.Lock(), threading.Lock()
        self._written = 0  # calls of enqueue
        self._flushed = self._checkpointed = 0  # how many of them are on disk, and in the file

    def close(self) -> None:
        """Closes the file and lets another process have it."""
        with self._flushing, self._reading, self._lock:
            if self._log is not None:
                self._log.close()
            for connection in (self._reader, self._keeper, self._db):
                connection.close()
            self._owner.close()

    # --- queue --------------------------------------------------------------------------------

    def enqueue(self, prompts: Sequence[Accepted]) -> list[Exception | None]:
        """Writes accepted prompts; a power failure spares them after the next ``flush``.

        Returns:
            For each prompt None, or why it could not be written.
        """
        rows = [_row(prompt) for prompt in prompts]
        with self._lock:
            outcomes = [self._insert(rows)] * len(rows)
            if len(rows) > 1 and outcomes[0] is not None:  # one is at fault: spare the others
                outcomes = [self._insert([row]) for row in rows]
            self._written += 1
        return outcomes

    def flush(self) -> None:
        """Returns when everything enqueued before is on disk; those who wait share one flush.

        Now and then it also moves the log into the file: nobody else need wait for that.

        Raises:
            OSError: the disk refuses.
        """
        wanted = self._written
        with self._flushing:
            if self._flushed >= wanted:
                return
            covered = self._written
            if self._log is not None:
                _sync(self._log.fileno())
            self._flushed = covered
            if covered - self._checkpointed >= _CHECKPOINT_EVERY:
                self._checkpointed = covered
                with contextlib.suppress(sqlite3.Error):  # the log only grows until the next time
                    self._keeper.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

    def _insert(self, rows: Sequence[tuple[object, ...]]) -> Exception | None:
        """Inserts all rows or none.

        One statement does it: each one gives up the interpreter, and under load getting it back
        takes longer than the disk.
        """
        values = ", ".join([_PLACES] * len(rows))
        try:
            self._db.execute(
                f"INSERT INTO queue ({_COLUMNS}) VALUES {values}", [v for row in rows for v in row]
            )
        except (sqlite3.Error, ValueError) as error:  # ValueError: half of a surrogate pair
            return error
        return None

    def mark_running(self, prompt_id: str) -> None:
        """Counts a start of the prompt; a disk that refuses does not keep it from running."""
        self._mark(prompt_id, "attempts + 1")

    def mark_waiting(self, prompt_id: str) -> bool:
        """A prompt that was started waits again, unless it was stopped; says whether it does."""
        return self._mark(prompt_id, "0")

    def mark_stopped(self, prompt_id: str) -> None:
        """A running prompt was stopped: if the process ends before it does, it is not retried."""
        self._mark(prompt_id, str(_STOPPED))

    def may_start(self, prompt_id: str) -> bool:
        """Whether a prompt that is in the queue was neither stopped nor started too often."""
        statement = "SELECT attempts FROM queue WHERE prompt_id = ?"
        try:
            with self._lock:
                row = self._db.execute(statement, (prompt_id,)).fetchone()
        except sqlite3.Error:
            logger.exception("the state of prompt %s could not be read", prompt_id)
            return False
        return row is not None and row[0] < MAX_ATTEMPTS

    def _mark(self, prompt_id: str, attempts: str) -> bool:
        statement = f"UPDATE queue SET attempts = {attempts} WHERE prompt_id = ? AND attempts < ?"
        try:
            with self._lock:
                return self._db.execute(statement, (prompt_id, _STOPPED)).rowcount > 0
        except sqlite3.Error:
            logger.exception("the state of prompt %s could not be written", prompt_id)
            return False

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
        with self._reading:
            rows = self._reader.execute(
                "SELECT number, prompt_id, prompt, extra_data, outputs, fingerprint, attempts "
                "FROM queue ORDER BY attempts = 0, number, arrival"
            ).fetchall()
        recovered = Recovered([], [], [], [])
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
            if attempts >= _STOPPED:
                recovered.stopped.append((item, fingerprint))
                continue
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
        """Moves a prompt from the queue (see the trigger) to the history, in one statement."""
        self._write(
            "INSERT OR REPLACE INTO history (prompt_id, fingerprint, entry) VALUES (?, ?, ?)",
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
        with self._reading:
            names = self._reader.execute(
                "SELECT prompt_id FROM history ORDER BY sequence"
            ).fetchall()
        for (prompt_id,) in names:
            with self._reading:
                row = self._reader.execute(
                    "SELECT fingerprint, entry FROM history WHERE prompt_id = ?", (prompt_id,)
                ).fetchone()
            if row is not None:
                yield prompt_id, row[0], row[1]

    def read_history(self, prompt_id: str) -> bytes | None:
        """One entry, as it was given to ``finish``."""
        with self._reading:
            row = self._reader.execute(
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
    number, prompt_id, _, _, outputs, _ = prompt.item
    return (
        prompt_id,
        float(number),
        prompt.arrival,
        prompt.texts.prompt,
        prompt.texts.extra_data,
        dump_json(outputs),
        prompt.fingerprint,
    )


def _connect(path: Path) -> sqlite3.Connection:
    """A connection in write-ahead mode; where the file system has none, each statement is synced.

    Raises:
        sqlite3.DatabaseError: the file is not a database.
    """
    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10.0)
    mode = db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
    db.execute(f"PRAGMA synchronous={'NORMAL' if mode == 'wal' else 'FULL'}")
    return db


def _open_log(db: sqlite3.Connection, path: Path) -> IO[bytes] | None:
    """The write-ahead log, to be flushed; None where statements are synced one by one.

    It exists, under this name, as long as the connection does. Its entry in the folder is synced.
    """
    if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        return None
    log = open(f"{path}-wal", "r+b", buffering=0)  # noqa: SIM115 - open as long as the journal
    if os.name != "nt":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return log


def _sync(descriptor: int) -> None:
    """Waits until what was written to a file is on disk."""
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    elif sys.platform == "win32":
        os.fsync(descriptor)
    else:
        os.fdatasync(descriptor)


def open_journal(folder: Path, port: int) -> Journal:
    """The journal of the server on this port: the folder's only one, or its own beside it.

    A second server in the same folder, on another port, gets a journal of its own and keeps it.
    One that finds the journal in the hands of a server on its own port waits a while: that is a
    predecessor which is about to end. A file that cannot be read is put aside, and said so.

    Raises:
        JournalInUseError: a server on the same port does not end.
        JournalError: the folder cannot be written.
    """
    shared, own = folder / "queue.sqlite", folder / f"queue-{port}.sqlite"
    path = own if own.exists() else shared
    deadline = time.monotonic() + _PREDECESSOR_S
    while True:
        try:
            return Journal(path, port)
        except JournalInUseError as error:
            if path == shared and error.port not in (0, port):
                logger.info("a server on port %d uses %s; using %s", error.port, shared, own)
                path = own
            elif time.monotonic() >= deadline:
                raise
            else:
                time.sleep(0.1)
        except (OSError, sqlite3.OperationalError) as error:
            raise JournalError(
                f"the queue cannot be kept in {path}: {error}; make room on that disk and the "
                "folder writable, name another with --user-directory, or start with --no-journal"
            ) from error
        except sqlite3.DatabaseError as error:
            aside = path.with_name(f"{path.name}.broken-{time.time_ns() // 1_000_000}")
            logger.error("%s cannot be read (%s); it is now %s", path, error, aside)
            path.rename(aside)
