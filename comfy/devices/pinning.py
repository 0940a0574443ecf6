"""Page-locked host memory: copies from it to a device run beside the device's computation.

A large tensor is locked where it is, through the driver's own call: no copy, no second buffer, and
none of the rounding of torch's pinned allocator. A small one is copied into torch's pinned pool,
because ranges that share a page cannot each be locked. Memory of a file is always copied, and the
file's pages are then free to go.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from comfy.devices import accelerators, memory
from comfy.devices.runtime import Runtime, get_runtime

logger = logging.getLogger(__name__)

IN_PLACE_BYTES = 256 * 1024
"""Smallest tensor that is locked where it is; a page is 4 KiB, or 64 KiB on some Arm systems."""

PINNED_SHARE = 0.45
"""Share of the machine's memory that may be locked: it is lost to everything else."""

PORTABLE = 1
"""Flag of the driver's call: the lock holds for all devices (cudaHostRegisterPortable)."""


class Pinned:
    """One tensor whose memory is page-locked while this object lives.

    Attributes:
        tensor: The locked tensor; keeps the memory alive.
        size: Its bytes.
    """

    size = 0
    _runtime: Runtime | None = None
    _driver: Any | None = None

    def __init__(self, tensor: torch.Tensor, runtime: Runtime, driver: Any | None) -> None:
        self._address = tensor.data_ptr()
        self._driver = driver
        self.tensor = tensor
        self._runtime, self.size = runtime, memory.tensor_bytes(tensor)
        runtime.pinned_bytes += self.size

    def __del__(self) -> None:  # also of one whose making a cancellation ended
        if self._runtime is not None:
            self._runtime.pinned_bytes -= self.size
        if self._driver is not None:
            self._driver.cudaHostUnregister(self._address)


def pinned_limit() -> int:
    """Bytes that may be page-locked at once."""
    return int(memory.total_ram_mib() * memory.MIB * PINNED_SHARE)


def pin(tensor: torch.Tensor, device: torch.device, own_memory: bool) -> Pinned | None:
    """Page-locked memory with a host tensor's contents, or None when the system gives none.

    Args:
        tensor: Source; it is itself the result's tensor where it could be locked in place.
        device: Device that copies will go to.
        own_memory: The memory is a file's or somebody else's: lock a copy.
    """
    runtime, size = get_runtime(), memory.tensor_bytes(tensor)
    if runtime.pinned_bytes + size > pinned_limit() or size == 0:
        return None
    source = tensor.detach()
    driver = _driver(device)
    if driver is None or size < IN_PLACE_BYTES or not source.is_contiguous():
        return _pooled(source, runtime)
    if own_memory:
        source = torch.empty_like(source).copy_(source)
    if int(driver.cudaHostRegister(source.data_ptr(), size, PORTABLE)) != 0:
        _clear_error(device)
        logger.warning("the system refused to page-lock %d bytes; they are copied unlocked", size)
        return None
    return Pinned(source, runtime, driver)


def _driver(device: torch.device) -> Any | None:
    """The driver calls that lock memory in place, where a back end has them."""
    ask = getattr(accelerators.device_module(device), "cudart", None)
    driver = ask() if ask is not None else None
    return driver if hasattr(driver, "cudaHostRegister") else None


def _pooled(source: torch.Tensor, runtime: Runtime) -> Pinned | None:
    try:
        return Pinned(source.pin_memory(), runtime, None)
    except RuntimeError as error:  # the system's limit on locked memory; copies then stay pageable
        logger.warning("no page-locked memory for %d bytes: %s", source.nbytes, error)
        return None


def _clear_error(device: torch.device) -> None:
    """Take the error a refused call left with the driver, which the next kernel would report."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)
        torch.accelerator.synchronize(device)
