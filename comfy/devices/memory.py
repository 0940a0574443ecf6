"""How many bytes devices have, hold and could give; sizes of tensors and modules in bytes."""

from __future__ import annotations

import gc
from typing import Literal, overload

import psutil
import torch
from torch import nn

from comfy.devices import accelerators
from comfy.devices.runtime import get_runtime

MIB = 1024 * 1024
GIB = 1024 * MIB

MIN_WEIGHT_MEMORY_RATIO = 0.0
"""Smallest share of free memory that weights get even when a run asks for all of it."""

EXTRA_RESERVED_VRAM = 400 * MIB
"""Bytes left to the display and other programs when the policy names no figure."""

ACTIVATION_FLOOR = 0.8 * GIB
"""Smallest inference memory assumed beside weights on a large device."""

UNIFIED_KINDS = ("cpu", "mps")
"""Device types whose memory is the machine's."""


OOM_EXCEPTION = torch.OutOfMemoryError
"""What torch raises when a device is full."""


def is_oom(error: BaseException) -> bool:
    """Whether an exception means that a device's memory ran out."""
    if isinstance(error, OOM_EXCEPTION):
        return True
    asynchronous = getattr(torch, "AcceleratorError", None)
    return (
        asynchronous is not None
        and isinstance(error, asynchronous)
        and "out of memory" in str(error).lower()
    )


def raise_non_oom(error: BaseException) -> None:
    """Raise an exception again unless it means that memory ran out."""
    if not is_oom(error):
        raise error


def total_vram_mib() -> float:
    """Memory of the primary device, in MiB."""
    return get_total_memory() / MIB


def total_ram_mib() -> float:
    """Memory of the machine, in MiB."""
    return psutil.virtual_memory().total / MIB


def dtype_size(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return dtype.itemsize


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.nelement() * tensor.element_size()


def module_size(module: nn.Module) -> int:
    """Bytes of all parameters and buffers of a module, counted by state-dict entry."""
    return sum(tensor_bytes(tensor) for tensor in module.state_dict().values())


@overload
def get_total_memory(
    dev: torch.device | None = None, torch_total_too: Literal[False] = False
) -> int: ...
@overload
def get_total_memory(
    dev: torch.device | None, torch_total_too: Literal[True]
) -> tuple[int, int]: ...
def get_total_memory(
    dev: torch.device | None = None, torch_total_too: bool = False
) -> int | tuple[int, int]:
    """Bytes a device has.

    Args:
        dev: Device; None is the primary one.
        torch_total_too: Also return how much of it torch's allocator has taken.
    """
    device = dev or get_runtime().device
    if device.type in UNIFIED_KINDS:
        total = torch_total = psutil.virtual_memory().total
    else:
        total = _device_free_total(device)[1]
        torch_total = _allocator_stat(device, "reserved_bytes.all.current")
    return (total, torch_total) if torch_total_too else total


@overload
def get_free_memory(
    dev: torch.device | None = None, torch_free_too: Literal[False] = False
) -> int: ...
@overload
def get_free_memory(dev: torch.device | None, torch_free_too: Literal[True]) -> tuple[int, int]: ...
def get_free_memory(
    dev: torch.device | None = None, torch_free_too: bool = False
) -> int | tuple[int, int]:
    """Bytes that can still be allocated on a device.

    What torch's caching allocator holds but does not use counts as free.

    Args:
        dev: Device; None is the primary one.
        torch_free_too: Return (free, bytes free inside torch's allocator).
    """
    device = dev or get_runtime().device
    if device.type in UNIFIED_KINDS:
        free = cached = _available_ram()
    else:
        cached = _allocator_stat(device, "reserved_bytes.all.current") - _allocator_stat(
            device, "active_bytes.all.current"
        )
        free = _device_free_total(device)[0] + cached
    return (free, cached) if torch_free_too else free


def _available_ram() -> int:
    """Bytes that programs can still get without swapping.

    Samplers ask before each step; on Linux reading the one figure takes a sixth of psutil's time.
    """
    try:
        with open("/proc/meminfo", "rb") as figures:
            for line in figures:
                if line.startswith(b"MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # another system
    return int(psutil.virtual_memory().available)


def _device_free_total(device: torch.device) -> tuple[int, int]:
    """(free, total) as the driver sees it; a type that cannot say gets 1 GiB of each."""
    ask = getattr(accelerators.device_module(device), "mem_get_info", None)
    if ask is None:
        return GIB, GIB
    free, total = ask(device)
    return int(free), int(total)


def _allocator_stat(device: torch.device, name: str) -> int:
    ask = getattr(accelerators.device_module(device), "memory_stats", None)
    return int(ask(device).get(name, 0)) if ask is not None else 0


def allocated_bytes(device: torch.device) -> int:
    """Bytes of live tensors on an accelerator; 0 for the CPU, where nobody counts."""
    if device.type in UNIFIED_KINDS:
        return 0
    return _allocator_stat(device, "allocated_bytes.all.current")


def extra_reserved_memory() -> int:
    """Bytes of the accelerator that stay free for other programs."""
    wanted = get_runtime().memory.reserve_vram_bytes
    return EXTRA_RESERVED_VRAM if wanted is None else wanted


def minimum_inference_memory() -> int:
    """Bytes any run needs beside weights: a fixed floor plus the reserve.

    The floor shrinks on small devices so that it never takes more than a tenth of the whole.
    """
    device = get_runtime().device
    if device.type in UNIFIED_KINDS:
        return int(ACTIVATION_FLOOR) + extra_reserved_memory()
    total = _device_free_total(device)[1]
    return int(min(ACTIVATION_FLOOR, total // 10)) + extra_reserved_memory()


def soft_empty_cache(force: bool = False) -> None:  # noqa: ARG001 - public signature
    """Give unused memory of torch's allocator back to the device."""
    device = get_runtime().device
    if device.type == "cpu":
        return
    module = accelerators.device_module(device)
    for name in ("synchronize", "empty_cache", "ipc_collect"):
        call = getattr(module, name, None)
        if call is not None:
            call()


def collect_garbage() -> None:
    """Run the cycle collector, then empty the allocator's cache."""
    gc.collect()
    soft_empty_cache()
