"""How much each user may keep: a bound on the bytes in a user's folders.

Uploads, user data and settings are refused beyond it, so are prompts, and the nodes of a running
one are not given names for further files. Admins, whose folders are everybody's, are not bounded.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

MEASURED_FOR_S = 10.0


class OverQuota(OSError):
    """A user's folders are full; the text says how full, and how to mend it."""

    def __init__(self, used: int, limit: int) -> None:
        super().__init__(
            errno.EDQUOT,
            f"your files take {used / 1e6:.1f} MB of {limit / 1e6:.1f} MB; delete some "
            "(outputs, uploads, workflows), or ask the administrator for a larger --user-quota",
        )


@dataclass
class _Measured:
    size_bytes: int
    at: float


class Quota:
    """Measures users' folders now and then, and counts what is added meanwhile.

    Every method may be called from any thread.

    Args:
        limit_bytes: For each user; 0 bounds nobody.
        folders: The folders of a user.
    """

    def __init__(
        self,
        limit_bytes: int,
        folders: Callable[[str], Iterable[str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._folders = folders
        self._clock = clock
        self._measured: dict[str, _Measured] = {}
        self._lock = threading.Lock()

    def used_bytes(self, user: str) -> int:
        """What the user's folders hold, as of the last seconds."""
        with self._lock:
            return self._measure(user).size_bytes

    def take(self, user: str | None, size_bytes: int = 0) -> None:
        """Counts bytes that are about to be written; with none, asks whether there is any room.

        Args:
            user: None for somebody who is not bounded.
        Raises:
            OverQuota: they do not fit.
        """
        if user is None or self.limit_bytes <= 0:
            return
        with self._lock:
            measured = self._measure(user)
            if measured.size_bytes + max(size_bytes, 1) > self.limit_bytes:
                del self._measured[user]  # files may have been deleted or replaced meanwhile
                measured = self._measure(user)
            if measured.size_bytes + max(size_bytes, 1) > self.limit_bytes:
                raise OverQuota(measured.size_bytes, self.limit_bytes)
            measured.size_bytes += size_bytes

    def _measure(self, user: str) -> _Measured:
        known, now = self._measured.get(user), self._clock()
        if known is None or now - known.at > MEASURED_FOR_S:
            size = sum(map(folder_bytes, self._folders(user)))
            known = self._measured[user] = _Measured(size, now)
        return known


def folder_bytes(folder: str) -> int:
    """Bytes of all files below a folder; links count as links. 0 if there is no such folder."""
    total, stack = 0, [folder]
    while stack:
        try:
            with os.scandir(stack.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        stack.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue  # removed meanwhile
    return total
