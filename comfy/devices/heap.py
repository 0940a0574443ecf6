"""The C library's heap, kept from giving memory back that the next operation asks for again.

A network frees and takes the same hundreds of megabytes many times in a forward pass. glibc returns
every large block to the system at once, which then clears and maps each page anew: a fifth of the
time of a Stable Diffusion 1.5 step on two cores. Here blocks stay in the process while prompts run;
`give_back` returns them when no prompt is left, or when memory is short.

Other C libraries are left as they are. Source: mallopt(3), malloc_trim(3).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
"""Parameter numbers of mallopt, from malloc.h."""

NEVER = -1
LARGEST_IN_HEAP = 128 * 2**20
"""Bytes from which a block is still a mapping of its own.

Blocks of the size of a decoder's features leave gaps in the heap: its peak grew by 0.6 GiB.
"""

LARGEST_OF_FEATURES = 32 * 2**20
"""The same in an autoencoder, whose features grow from level to level.

The blocks of one level do not fit the next, so what is kept is only added to the peak (0.4 GiB
where a picture of 512 x 512 is decoded), and each level is gone through once: mapping pages anew
costs no more than reading cold ones.
"""

GROWTH = 16 * 2**20
"""Bytes by which the heap grows beyond what is asked for."""


WORTHWHILE = 128 * 2**20
"""Free bytes below which `tidy` leaves them: small networks would take them again at once."""


class Heap:
    """The process's heap.

    Attributes:
        keeps_pages: Freed blocks stay in the process.
    """

    def __init__(self) -> None:
        self.keeps_pages = False
        self._asked: list[int] = []  # sizes, by what computes now
        self._lock = threading.Lock()

    def keep_pages(self) -> bool:
        """Let freed blocks stay; says whether the C library does so.

        To be called before other threads take memory: one heap for all threads is what keeps their
        blocks reusable, and glibc's further ones hold no large blocks.
        """
        library = _glibc()
        if library is not None:
            settings = (
                (M_ARENA_MAX, 1),
                (M_MMAP_THRESHOLD, self._largest()),
                (M_TRIM_THRESHOLD, NEVER),
                (M_TOP_PAD, GROWTH),
            )
            self.keeps_pages = all(library.mallopt(*setting) == 1 for setting in settings)
        return self.keeps_pages

    @contextlib.contextmanager
    def keeping_up_to(self, size_bytes: int) -> Iterator[None]:
        """Meanwhile only blocks below a size stay in the process; larger ones go back at once.

        Threads share the heap: the smallest size that any of them asks for counts.
        """
        library = _glibc() if self.keeps_pages else None
        if library is None:
            yield
            return
        self._asked.append(size_bytes)
        self._tell(library)
        try:
            yield
        finally:
            self._asked.remove(size_bytes)
            self._tell(library)

    def _largest(self) -> int:
        return min(self._asked, default=LARGEST_IN_HEAP)

    def _tell(self, library: ctypes.CDLL) -> None:
        with self._lock:  # whoever tells last knows what all ask for
            library.mallopt(M_MMAP_THRESHOLD, self._largest())

    def give_back(self) -> bool:
        """Return all whole pages that are free to the system; says whether any were.

        Other threads that take memory wait for it: 0.2 s where a GiB is free.
        """
        library = _glibc() if self.keeps_pages else None
        return library is not None and library.malloc_trim(0) == 1

    def tidy(self) -> None:
        """Between two networks: what the one has left may not fit the blocks of the other."""
        library = _glibc() if self.keeps_pages else None
        if library is not None and library.mallinfo2().fordblks > WORTHWHILE:
            library.malloc_trim(0)


class _HeapFigures(ctypes.Structure):
    """What mallinfo2(3) returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is a glibc that tells all that is needed (2.33 or later)."""
    try:
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _HeapFigures
        library.malloc_trim.argtypes = (ctypes.c_size_t,)
        library.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    except (AttributeError, OSError, TypeError):  # another library; Windows has no such handle
        return None
    return library


HEAP = Heap()
