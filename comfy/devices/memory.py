"""How many bytes devices have, hold and could give; sizes of tensors and modules in bytes."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Sequence
from typing import Literal, overload

import psutil
import torch
from torch import nn

from comfy.devices import accelerators, container
from comfy.devices.heap import HEAP
from comfy.devices.runtime import get_runtime, primary_device

MIB = 1024 * 1024
GIB = 1024 * MIB

MIN_WEIGHT_MEMORY_RATIO = 0.0
"""Smallest share of free memory that weights get even when a run asks for all of it."""

EXTRA_RESERVED_VRAM = 400 * MIB
"""Bytes left to the display and other programs when the policy names no figure."""

ACTIVATION_FLOOR = 0.8 * GIB
"""Smallest inference memory assumed beside weights on a large device."""

WEIGHTS_SHARE = 0.88
"""Share of a device that weights may take beside the inference memory."""

UNIFIED_KINDS = ("cpu", "mps")
"""Device types whose memory is the machine's."""

RECENT_S = 0.25
_ram_read = (float("-inf"), 0)  # when main memory was last read (monotonic clock), and its bytes


OOM_EXCEPTION = torch.OutOfMemoryError
"""What torch raises when a device is full."""


class NotEnoughMemory(OOM_EXCEPTION):
    """Memory ran out, or would have; the text says what was wanted and what there is.

    Custom nodes that catch torch's error, to work in smaller parts, catch this too.
    """


NOTICEABLE_BYTES = 256 * MIB
"""Tensors up to this size are taken without asking whether there is room."""

SCARCE_BYTES = 2 * GIB
"""Main memory below which what the heap keeps is given back before it is counted as taken."""

FULL = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "storage size calculation overflowed",
)
"""What back ends without an exception type of their own say when memory runs out."""


def is_oom(error: BaseException) -> bool:
    """Whether an exception means that memory, of a device or of the machine, ran out.

    CUDA reports some failures late and as another type; Apple's back end and the CPU's allocator
    raise a plain RuntimeError.
    """
    if isinstance(error, (OOM_EXCEPTION, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    try:
        text = str(error).lower()
    except Exception:  # noqa: BLE001 - a node's own class, whose text may fail: not a back end's
        return False
    return any(words in text for words in FULL)


def raise_non_oom(error: BaseException) -> None:
    """Raise an exception again unless it means that memory ran out."""
    if not is_oom(error):
        raise error


def total_vram_mib() -> float:
    """Memory of the primary device, in MiB."""
    return get_total_memory() / MIB


def total_ram_mib() -> float:
    """Main memory that this process may use, in MiB."""
    return total_ram() / MIB


def total_ram() -> int:
    """Bytes of main memory that this process may use: the machine's, or its container's limit."""
    machine = int(psutil.virtual_memory().total)
    limit = container.CONTAINER.ram_limit()
    return machine if limit is None else min(machine, limit)


def swap_memory() -> tuple[int, int]:
    """(total, free) bytes of swap that this process may use."""
    swap, left = psutil.swap_memory(), container.CONTAINER.swap_left()
    return (swap.total, swap.free) if left is None else (
        min(swap.total, left), min(swap.free, left)
    )  # fmt: skip


def dtype_size(dtype: torch.dtype) -> int:
    """Bytes of one element."""
    return dtype.itemsize


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.nelement() * tensor.element_size()


def module_size(module: nn.Module) -> int:
    """Bytes of all parameters and buffers of a module, those under several names once."""
    held = [t for t in module.state_dict(keep_vars=True).values() if isinstance(t, torch.Tensor)]
    for part in module.modules():  # buffers that files do not hold take memory as well
        buffers = (part._buffers.get(name) for name in part._non_persistent_buffers_set)
        held += [buffer for buffer in buffers if buffer is not None]
    return sum({id(tensor): tensor_bytes(tensor) for tensor in held}.values())


def _device(dev: torch.device | str | None) -> torch.device:
    """The device a public question is about."""
    return primary_device() if dev is None else accelerators.with_index(dev)


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
    device = _device(dev)
    if device.type in UNIFIED_KINDS:
        total = torch_total = total_ram()
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
    device = _device(dev)
    if device.type in UNIFIED_KINDS:
        free = _available_ram()
        if free < SCARCE_BYTES and HEAP.give_back():
            free = _available_ram()
        cached = free
    else:
        held, used = _allocator_stats(
            device, "reserved_bytes.all.current", "active_bytes.all.current"
        )
        cached = held - used
        free = _device_free_total(device)[0] + cached
    return (free, cached) if torch_free_too else free


def require_room(
    shape: Sequence[int],
    name: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    times: int = 1,
) -> None:
    """Refuse a tensor for which there is no room, before it is made.

    Systems promise more main memory than they have, and kill the process that uses it.

    Args:
        name: What it is, for the error.
        times: How often its size is taken while it is made.
    Raises:
        NotEnoughMemory: It is larger than what is free.
    """
    wanted = math.prod(shape) * dtype.itemsize * times
    if wanted <= NOTICEABLE_BYTES:
        return
    place = _device(device)
    free = get_free_memory(place)
    if wanted > free and HEAP.give_back():
        free = get_free_memory(place)
    if place.type in UNIFIED_KINDS:
        free += swap_memory()[1]
    if wanted > free:
        raise NotEnoughMemory(
            f"{name} of shape {tuple(shape)} would take {in_gib(wanted)}"
            f"{' while it is made' if times > 1 else ''}, and {in_gib(free)} are free on {place}; "
            "lower its width, height, length or count"
        )


def require_room_for_pairs(
    tokens: int, name: str, device: torch.device, dtype: torch.dtype, times: int = 1
) -> None:
    """As `require_room`, of numbers for each pair of tokens, which a long text has many of.

    Accelerators refuse by themselves, and what they hold may give way.
    """
    if device.type in UNIFIED_KINDS:
        require_room((times, tokens, tokens), name, device, dtype)


def require_capacity(needed: float, name: str, device: torch.device) -> None:
    """Refuse work that would take more main memory than the machine has, swap included.

    The system would end the process, or another one. Accelerators refuse by themselves.

    Args:
        needed: Estimate in bytes.
        name: What needs it, for the error.
    Raises:
        NotEnoughMemory: It can never fit.
    """
    if device.type not in UNIFIED_KINDS:
        return
    whole = get_total_memory(device) + swap_memory()[0]
    if needed > whole:
        raise NotEnoughMemory(
            f"{name} needs about {in_gib(needed)}, and this machine has {in_gib(whole)}; lower "
            "its width, height, length or count"
        )


def in_gib(size_bytes: float) -> str:
    """A size for people."""
    return f"{size_bytes / GIB:.1f} GiB"


def recent_free_memory(device: torch.device) -> int:
    """`get_free_memory` for loops that ask at every step: main memory is read anew after a while.

    Asking the system costs as much as a dozen small operations, and gives the interpreter away.
    """
    if device.type not in UNIFIED_KINDS:
        return get_free_memory(device)
    global _ram_read
    now_s = time.monotonic()
    if now_s - _ram_read[0] > RECENT_S:
        _ram_read = (now_s, get_free_memory(device))
    return _ram_read[1]


def _available_ram() -> int:
    """Bytes that this process can still get without swapping, in its container if it has one."""
    machine, left = _machines_available_ram(), container.CONTAINER.ram_left()
    return machine if left is None else min(machine, left)


def _machines_available_ram() -> int:
    """Bytes that programs can still get without swapping.

    On Linux reading the one figure takes a sixth of psutil's time.
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
    module = accelerators.device_module(device)
    ask = getattr(module, "mem_get_info", None)
    if ask is not None:
        try:
            free, total = ask(device)
            return int(free), int(total)
        except RuntimeError:  # some integrated GPUs tell their size but not what is free
            pass
    properties = getattr(module, "get_device_properties", None)
    total = int(getattr(properties(device), "total_memory", 0)) if properties is not None else 0
    total = total or GIB
    return max(0, total - _allocator_stat(device, "reserved_bytes.all.current")), total


def _allocator_stats(device: torch.device, *names: str) -> list[int]:
    """Figures of torch's allocator, asked for together: building the table takes its time."""
    ask = getattr(accelerators.device_module(device), "memory_stats", None)
    table = ask(device) if ask is not None else {}
    return [int(table.get(name, 0)) for name in names]


def _allocator_stat(device: torch.device, name: str) -> int:
    return _allocator_stats(device, name)[0]


def allocated_bytes(device: torch.device) -> int:
    """Bytes of live tensors on an accelerator; 0 for the CPU, where nobody counts."""
    if device.type in UNIFIED_KINDS:
        return 0
    return _allocator_stat(device, "allocated_bytes.all.current")


def extra_reserved_memory() -> int:
    """Bytes of the accelerator that stay free for other programs."""
    wanted = get_runtime().memory.reserve_vram_bytes
    return EXTRA_RESERVED_VRAM if wanted is None else wanted


def reserve_of(device: torch.device) -> int:
    """Bytes of one device that stay free for other programs.

    The usual figure is at most a tenth of a small device; one that the policy names is kept.
    """
    usual = get_runtime().memory.reserve_vram_bytes is None and device.type not in UNIFIED_KINDS
    share = _device_free_total(device)[1] // 10 if usual else extra_reserved_memory()
    return min(extra_reserved_memory(), share)


def minimum_inference_memory() -> int:
    """Bytes any run needs beside weights: a fixed floor plus the reserve."""
    return inference_floor(primary_device())


def inference_floor(device: torch.device) -> int:
    """`minimum_inference_memory` of one device.

    The floor shrinks on small devices so that it never takes more than a tenth of the whole.
    """
    if device.type in UNIFIED_KINDS:
        return int(ACTIVATION_FLOOR) + extra_reserved_memory()
    total = _device_free_total(device)[1]
    return int(min(ACTIVATION_FLOOR, total // 10)) + reserve_of(device)


def maximum_vram_for_weights(device: torch.device | None = None) -> float:
    """Bytes of weights a device can take at most."""
    device = _device(device)
    return get_total_memory(device) * WEIGHTS_SHARE - inference_floor(device)


def soft_empty_cache(force: bool = False) -> None:  # noqa: ARG001 - public signature
    """Give unused memory of torch's allocator back to the device."""
    device = primary_device()
    if device.type == "cpu":
        HEAP.give_back()
        return
    torch.accelerator.synchronize(device)
    module = accelerators.device_module(device)
    for name in ("empty_cache", "ipc_collect"):
        call = getattr(module, name, None)
        if call is not None:
            call()


def collect_garbage() -> None:
    """Run the cycle collector, then empty the allocator's cache."""
    gc.collect()
    soft_empty_cache()
