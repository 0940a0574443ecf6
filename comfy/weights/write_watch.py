"""Whether a weight was written to since it was converted, without reading it.

Linux notes for each page whether anything wrote to it, whatever way it took: the page is protected,
and its first write, a microsecond dearer, ends that without anybody being asked (userfaultfd in
its asynchronous mode, Linux 6.7). Where the system cannot be asked, or a container forbids it,
there is no watch, and contents have to be compared.
Source: https://docs.kernel.org/admin-guide/mm/userfaultfd.html
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import platform
import struct
import sys
import weakref

import torch

from comfy.weights import page_table, pages

logger = logging.getLogger(__name__)

SYSTEM_CALLS = {"x86_64": 323, "aarch64": 282}
"""Number of userfaultfd by processor."""

UFFDIO_API, UFFDIO_REGISTER, UFFDIO_WRITEPROTECT = 0xC018AA3F, 0xC020AA00, 0xC018AA06

API, WP_ASYNC, REGISTER_WP, USER_MODE_ONLY = 0xAA, 1 << 15, 1 << 1, 1


class Watch:
    """The memory of a large tensor as it was at one moment.

    Valid until the next watch of the same memory begins, which new contents get.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._address = tensor.data_ptr()
        self._length = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._form = (tensor.dtype, tensor.shape, tensor.stride())

    def saw_nothing(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is what it was at that moment, for certain."""
        if _latest.get(self._address) is not self or tensor.data_ptr() != self._address:
            return False
        if self._form != (tensor.dtype, tensor.shape, tensor.stride()):
            return False
        try:
            return page_table.is_unwritten(self._address, self._length)
        except OSError:  # another process than the one that watches
            return False

    def end(self) -> None:
        """No longer note writes, before the whole is written."""
        _latest.pop(self._address, None)
        with contextlib.suppress(OSError):
            self._protect(False)

    def begin(self) -> bool:
        """Note writes from now on; says whether the system does."""
        _latest.pop(self._address, None)
        descriptor = _descriptor(os.getpid())
        if descriptor is None:
            return False
        try:
            _control(descriptor, UFFDIO_REGISTER, self._address, self._length, REGISTER_WP, 0)
            self._protect(True)
        except OSError as error:  # such as too many mappings
            logger.debug("writes to a weight of %d bytes are not noted: %s", self._length, error)
            return False
        _latest[self._address] = self
        return True

    def _protect(self, on: bool) -> None:
        descriptor = _descriptor(os.getpid())
        if descriptor is not None:
            _control(descriptor, UFFDIO_WRITEPROTECT, self._address, self._length, int(on))


_latest: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()
"""The watch of the memory at an address."""


def watch(tensor: torch.Tensor) -> Watch | None:
    """Note writes to a tensor that only the caller knows yet; None where that is not possible.

    A small tensor shares its pages with others.
    """
    if tensor.nbytes < pages.LARGE or tensor.data_ptr() % mmap.PAGESIZE:
        return None
    made = Watch(tensor)
    return made if made.begin() else None


@functools.cache
def _descriptor(process: int) -> int | None:  # noqa: ARG001 - a fork gets one of its own
    """What the system is asked through; None, which the log says, where it does not note writes."""
    try:
        return _open()
    except OSError as error:
        logger.info(
            "this system does not tell whether a weight was written to (%s): before its first LoRA "
            "each weight is compared with its file, so that LoRA takes up to twice as long",
            error.strerror,
        )
        return None


def _open() -> int:
    """A descriptor through which writes are noted.

    Raises:
        OSError: The system has none, with the reason in words.
    """
    number = SYSTEM_CALLS.get(platform.machine())
    if sys.platform != "linux" or sys.maxsize < 2**32 or number is None:
        raise OSError(errno.ENOSYS, "that needs 64-bit Linux on x86-64 or Arm64")
    descriptor = int(
        ctypes.CDLL(None, use_errno=True).syscall(number, os.O_CLOEXEC | USER_MODE_ONLY)
    )
    if descriptor < 0:
        reason = os.strerror(ctypes.get_errno())
        raise OSError(ctypes.get_errno(), f"userfaultfd: {reason}; containers may forbid it")
    try:
        _control(descriptor, UFFDIO_API, API, WP_ASYNC, 0)
    except OSError as error:
        os.close(descriptor)
        raise OSError(error.errno, "that needs Linux 6.7 or later") from error
    return descriptor


def _control(descriptor: int, call: int, *words: int) -> None:
    """One ioctl with a structure of 64-bit words."""
    import fcntl  # not on Windows

    fcntl.ioctl(descriptor, call, bytearray(struct.pack(f"{len(words)}Q", *words)))
