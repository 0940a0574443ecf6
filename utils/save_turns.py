"""Turns at saving, where several processes save into the same folders.

A node asks for the next free number of a prefix, and writes its files after that: one for each
picture of a batch. Of two processes that asked at the same time one would overwrite the other's
files. So in a worker the number is given under a lock of folder and prefix, shared by all workers,
which is held until the node has ended. Without workers nobody installs this, and nothing is locked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import IO

logger = logging.getLogger(__name__)

POLL_S = 0.01
_TAKEN = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)  # what systems say of a lock another has
LONGEST_SECOND_WAIT_S = 30.0
"""How long a node that has its turn at one prefix waits for a second: its owner may wait for it."""


class SaveTurns:
    """The turns of this process.

    Args:
        folder: Of the lock files; the same for all processes.
        check_interrupt: Raises the interruption if the prompt that waits is to stop.
    """

    def __init__(self, folder: str, check_interrupt: Callable[[], None] = lambda: None) -> None:
        self._folder = folder
        self._check_interrupt = check_interrupt
        self._held: dict[str, IO[bytes]] = {}
        self._lock = threading.Lock()

    def take(self, folder: str, prefix: str) -> None:
        """Waits until no other process saves under this prefix."""
        place = f"{os.path.realpath(folder)}\0{prefix}"
        name = hashlib.sha256(place.encode("utf-8", "surrogatepass")).hexdigest()
        with self._lock:
            if name in self._held:
                return
            has_others = bool(self._held)
        os.makedirs(self._folder, exist_ok=True)
        handle = open(os.path.join(self._folder, name), "ab")  # noqa: SIM115 - held until `give_back`
        started = time.monotonic()
        try:
            while not _locks(handle):
                self._check_interrupt()
                if has_others and time.monotonic() - started > LONGEST_SECOND_WAIT_S:
                    logger.warning("another worker has been saving %s for long", prefix)
                    handle.close()
                    return
                time.sleep(POLL_S)
        except BaseException:
            handle.close()
            raise
        with self._lock:
            self._held[name] = handle

    def give_back(self) -> None:
        """The node has ended: others may save."""
        with self._lock:
            held, self._held = self._held, {}
        for handle in held.values():
            with contextlib.suppress(OSError):
                handle.close()


def _locks(handle: IO[bytes]) -> bool:
    """Tries to lock a file; the system drops the lock with the handle, or with the process.

    Raises:
        OSError: There are no locks there.
    """
    try:
        if os.name == "nt":
            import msvcrt

            handle.seek(0)
            msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise OSError(
            error.errno,
            f"{handle.name} cannot be locked ({error.strerror}), so workers could save over each "
            "other's files; put the temp folder on a disk that has locks (--temp-directory)",
        ) from error
    return True


_turns: SaveTurns | None = None


def install(turns: SaveTurns | None) -> None:
    """Has this process save in turns; None lets it save at once."""
    global _turns
    _turns = turns


def take_turn(folder: str, prefix: str) -> None:
    """Called before the next free number of a prefix is looked for."""
    if _turns is not None:
        _turns.take(folder, prefix)


def give_back_turns() -> None:
    """Called when a node has ended, or the next one is about to start."""
    if _turns is not None:
        _turns.give_back()
