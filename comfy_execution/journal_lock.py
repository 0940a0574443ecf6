"""One journal, one process: a lock beside the file that the system drops when the process ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


class JournalError(RuntimeError):
    """The queue cannot be kept on disk; the text says why and how to mend it."""


class JournalInUseError(JournalError):
    """Another running server owns the journal file.

    Attributes:
        port: Where that server serves; 0 if it does not say.
    """

    def __init__(self, path: Path, port: int) -> None:
        where = f" (on port {port})" if port else ""
        super().__init__(
            f"{path} is in use by another running server{where}; stop it, or give this one another "
            "user directory"
        )
        self.port = port


def claim(path: Path, port: int) -> IO[bytes]:
    """Locks a file beside the journal until the returned handle is closed; writes the port there.

    Raises:
        JournalInUseError: another process has it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = open(f"{path}.lock", "a+b", buffering=0)  # noqa: SIM115 - open as long as the journal
    try:
        _lock_file(handle)
    except OSError as error:
        with handle:
            raise JournalInUseError(path, _read_port(handle)) from error
    handle.truncate(0)
    handle.write(str(port).encode("ascii"))
    return handle


def _read_port(handle: IO[bytes]) -> int:
    """The port that the owner of a lock wrote into it; 0 if it cannot be read."""
    try:
        handle.seek(0)
        return int(handle.read() or b"0")
    except (OSError, ValueError):
        return 0


def _lock_file(handle: IO[bytes]) -> None:
    """Takes an exclusive lock without waiting; the system drops it when the process ends."""
    if os.name == "nt":
        import msvcrt

        handle.seek(1 << 20)  # a locked byte cannot be read by others, so not one of the port's
        msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
