"""Memory for large weights in huge pages, taken again while other weights are put in their place.

The system gives memory a page at a time as it is first written: cleared and entered in a table.
With pages of 4 KiB that takes twice as long as copying a weight into them; with pages of 2 MiB a
third of that. So a large weight gets a mapping of its own that asks for huge pages, where Linux
has them (https://docs.kernel.org/admin-guide/mm/transhuge.html); elsewhere torch's own memory
serves. Its end, less than a huge page, stays in small ones: a mapping takes no more memory than the
weight.

A virtual machine that gives free huge pages to its host gets each back in 9 ms, and as much in
small ones, which come from what is left over, in 2 ms (measured on KVM): there small pages serve.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import math
import mmap
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from comfy.devices.runtime import get_runtime

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on x86-64 and, with 4 KiB pages, Arm64."""

LARGE = HUGE_PAGE
"""Bytes from which a weight has a mapping, and so pages, of its own."""

SMALL_PAGE = 4096

BALLOONS = "/sys/bus/virtio/drivers/virtio_balloon/virtio*/features"

KEPT_BYTES = 256 << 20
"""Most bytes kept for the next weights, unless a single one is larger."""


class WeightMemory:
    """Gives weights their memory, and while weights are being replaced, that of the former ones.

    Memory belongs to the tensor over it and is freed with it. Inside `reuse` it is kept instead,
    and the next tensor of its size gets it as it is: nothing has to be cleared.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection of garbage may come back here at any point
        self._users = 0
        self._kept: dict[int, list[np.ndarray]] = {}
        self.kept_bytes = 0
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, channels_last: bool = False
    ) -> torch.Tensor:
        """A tensor on the CPU with undefined contents.

        Args:
            shape: Its shape; of four axes when `channels_last`.
            dtype: Its type.
            channels_last: Lay the second axis out innermost.
        """
        size = math.prod(shape) * dtype.itemsize
        if channels_last:
            shape = [shape[0], *shape[2:], shape[1]]
        block = self._block(size) if size >= LARGE else None
        if block is None:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
        else:
            owner = block[:]  # an array of its own: the block is free again when it is gone
            weakref.finalize(owner, self._take_back, block).atexit = False
            tensor = torch.from_numpy(owner).view(dtype).view(shape)
        return tensor.movedim(-1, 1) if channels_last else tensor

    def empty_like(self, weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor on the CPU in another's shape and layout, row-major or channels-last."""
        rows = weight.is_contiguous()
        channels_last = not rows and is_channels_last(weight)
        if not rows and not channels_last:
            return torch.empty_like(weight, dtype=dtype, device="cpu")
        return self.empty(weight.shape, dtype or weight.dtype, channels_last)

    def scratch(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor for intermediate values; inside `reuse` the next one gets the same memory."""
        size = math.prod(shape) * dtype.itemsize
        if not self._users:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._scratch[:size].view(dtype).view(shape)

    @contextmanager
    def reuse(self) -> Iterator[None]:
        """Keep freed memory for tensors made inside; at the end what was not taken goes back."""
        with self._lock:
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._kept.clear()
                    self.kept_bytes = 0
                    self._scratch = self._scratch[:0].clone()

    def _block(self, size: int) -> np.ndarray | None:
        """`size` bytes with undefined contents; None where the system maps none."""
        if not hasattr(mmap, "MAP_ANONYMOUS"):
            return None
        with self._lock:
            if kept := self._kept.get(size):
                self.kept_bytes -= size
                return kept.pop()
        try:
            return self._mapped(size)
        except OSError:  # too many mappings, or a kernel without huge pages: torch's memory serves
            return None

    @staticmethod
    def _mapped(size: int) -> np.ndarray:
        mapping = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(mapping, dtype=np.uint8)
        skipped = -whole.ctypes.data % HUGE_PAGE
        if get_runtime().memory.huge_pages and has_huge_pages():
            mapping.madvise(mmap.MADV_HUGEPAGE, skipped, size // HUGE_PAGE * HUGE_PAGE)
        return whole[skipped : skipped + size]

    def _take_back(self, block: np.ndarray) -> None:
        with self._lock:
            fits = not self.kept_bytes or self.kept_bytes + len(block) <= KEPT_BYTES
            if self._users and fits:
                self._kept.setdefault(len(block), []).append(block)
                self.kept_bytes += len(block)


@functools.cache
def has_huge_pages() -> bool:
    """Whether the system can be asked for huge pages, and has them at hand."""
    asked = hasattr(mmap, "MADV_HUGEPAGE") and mmap.PAGESIZE == SMALL_PAGE
    return asked and not any(map(_gives_memory_away, glob.glob(BALLOONS)))


def _gives_memory_away(features: str) -> bool:
    """Whether a memory balloon tells the host which pages are free.

    Args:
        features: File with the features it agreed on, a digit for each; the one asked for is
            VIRTIO_BALLOON_F_REPORTING (https://docs.oasis-open.org/virtio/virtio/v1.2, 5.5.3).
    """
    with contextlib.suppress(OSError), open(features, encoding="ascii") as file:
        return file.read(6)[5:] == "1"
    return False


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its channels innermost and a row-major one would look different."""
    return (
        tensor.ndim == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )
