"""What the system's page table tells of memory: whether its pages were written to.

Source: https://docs.kernel.org/admin-guide/mm/pagemap.html
"""

from __future__ import annotations

import ctypes
import mmap
import struct

import numpy as np

TABLE = "/proc/self/pagemap"

PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg), Linux 6.7

WRITTEN, FILE, PRESENT, SWAPPED = 1 << 1, 1 << 2, 1 << 3, 1 << 4
"""Categories of pages of that call."""

ONLY_WATCHED = 1 << 1
"""Flag of that call: an error where writes to memory are not noted."""

_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
"""Bits of an entry of the table."""


def is_clean(address: int, length: int) -> bool:
    """Whether no page of a private mapping of a file was written to.

    Args:
        address: Of the first page.
        length: Bytes; whole pages.
    """
    try:
        return not _has_page(address, length, 0, FILE, FILE, PRESENT | SWAPPED)
    except (ImportError, OSError):
        return _is_clean_by_entries(address, length)


def is_unwritten(address: int, length: int) -> bool:
    """Whether no page was written to, dropped or moved out since writes to it are noted.

    Args:
        address: Of the first page.
        length: Bytes; whole pages.
    Raises:
        OSError: Writes are not noted there.
    """
    return not _has_page(address, length, ONLY_WATCHED, PRESENT, 0, WRITTEN | PRESENT)


def _has_page(
    address: int, length: int, flags: int, inverted: int, required: int, any_of: int
) -> bool:
    """Whether a range has a page of some categories.

    Args:
        address: Of the first page.
        length: Bytes; whole pages.
        flags: Of the call.
        inverted: Categories that in what follows count where a page lacks them.
        required: Categories it has to have all of.
        any_of: Categories it has to have one of.
    """
    import fcntl  # not on Windows

    found = (ctypes.c_uint64 * 3)()  # room for one range of pages
    size = struct.calcsize("12Q")
    call = struct.pack(
        "12Q", size, flags, address, address + length, 0, ctypes.addressof(found), 1, 1,
        inverted, required, any_of, any_of,
    )  # fmt: skip
    with open(TABLE, "rb", buffering=0) as table:
        return fcntl.ioctl(table.fileno(), PAGEMAP_SCAN, bytearray(call)) > 0


def _is_clean_by_entries(address: int, length: int) -> bool:
    """`is_clean` by reading the table, for systems that cannot be asked."""
    first, count = address // mmap.PAGESIZE, length // mmap.PAGESIZE
    try:
        with open(TABLE, "rb", buffering=0) as table:
            table.seek(first * 8)
            pages = np.frombuffer(table.read(count * 8), dtype=np.uint64)
    except OSError:
        return False
    written = ((pages & _PRESENT) != 0) & ((pages & _OF_FILE) == 0)
    written |= (pages & _SWAPPED) != 0
    return len(pages) == count and not bool(written.any())
