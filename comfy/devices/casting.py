"""Moving tensors between devices and types, and the copy streams that do it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.compiler import is_compiling as compiling

from comfy.devices import accelerators
from comfy.devices.runtime import get_runtime

BLOCK_ELEMENTS = 2**15
"""Elements that are looked up at a time; torch does not split so few among threads."""

SLOW_THREADS = 4
"""Up to so many threads together convert float8_e4m3fn slower than one of them looks values up:
5 ns each, where a table takes 1.1 ns (torch 2.14, Xeon with AVX-512)."""


def device_supports_non_blocking(device: torch.device) -> bool:
    """Whether copies to this device may be issued without waiting.

    Never copies to the CPU: nothing there waits for them, so unfinished bytes would be read.
    """
    runtime = get_runtime()
    if device.type == "cpu" or runtime.precision.deterministic:
        return False
    return runtime.memory.force_non_blocking or accelerators.accelerator_row(device).non_blocking


def cast_to(
    weight: torch.Tensor,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    stream: Any | None = None,
) -> torch.Tensor:
    """A tensor on another device or in another type; the tensor itself when nothing changes.

    Args:
        weight: Source; never modified.
        copy: Return a new tensor even when nothing changes.
        stream: Stream to issue the copy on; the caller waits for it.
    """
    same = (device is None or weight.device == device) and (dtype is None or weight.dtype == dtype)
    if same and not copy:
        return weight
    device, dtype = device or weight.device, dtype or weight.dtype
    if weight.dtype == torch.float8_e4m3fn and device.type == weight.device.type == "cpu":
        return _converted_float8(weight, dtype)
    if stream is None:
        return weight.to(device, dtype, non_blocking=non_blocking, copy=copy)
    with on_stream(device, stream):
        return weight.to(device, dtype, non_blocking=non_blocking, copy=copy)


def _converted_float8(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A new tensor with the values of one of float8_e4m3fn, both on the CPU."""
    wide = dtype in (torch.float32, torch.float16, torch.bfloat16)
    plain = type(weight) in (torch.Tensor, torch.nn.Parameter) and not weight.requires_grad
    channels_last = weight.ndim > 2 and weight.movedim(1, -1).is_contiguous()
    quick = wide and plain and (weight.is_contiguous() or channels_last) and not compiling()
    if not quick or torch.get_num_threads() > SLOW_THREADS:
        return weight.to(dtype, copy=True)
    table, out = _float8_values(dtype), torch.empty_like(weight, dtype=dtype)
    stored, values = (
        tensor.flatten() if weight.is_contiguous() else tensor.movedim(1, -1).flatten()
        for tensor in (weight.detach().view(torch.uint8), out)
    )  # in the order of their memory, so none is copied
    places = torch.empty(min(len(stored), BLOCK_ELEMENTS), dtype=torch.int32, device="cpu")
    for block, into in zip(stored.split(BLOCK_ELEMENTS), values.split(BLOCK_ELEMENTS)):
        torch.index_select(table, 0, places[: len(block)].copy_(block), out=into)
    return out


@functools.cache
def _float8_values(dtype: torch.dtype) -> torch.Tensor:
    """The value of each of the 256 bit patterns of float8_e4m3fn."""
    patterns = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8)
    return patterns.view(torch.float8_e4m3fn).to(dtype)


def cast_to_device(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None, copy: bool = False
) -> torch.Tensor:
    """`cast_to` with copies issued without waiting where the device allows it."""
    return cast_to(
        tensor, dtype, device, non_blocking=device_supports_non_blocking(device), copy=copy
    )


def async_streams(device: torch.device) -> int:
    """How many copy streams streamed weights use on a device; 0 copies synchronously."""
    row = accelerators.accelerator_row(device)
    if device.type == "cpu" or not row.streams:
        return 0
    wanted = get_runtime().memory.async_offload_streams
    return 2 if wanted is None else wanted


def current_stream(device: torch.device | None) -> Any:
    """The stream kernels are issued on, or None for devices without streams."""
    if device is None or not accelerators.accelerator_row(device).streams:
        return None
    return torch.accelerator.current_stream(device)


def on_stream(device: torch.device, stream: Any) -> Any:
    """A context in which work on `device` is issued on `stream`."""
    return accelerators.device_module(device).stream(stream)


def pin_memory_supported(device: torch.device) -> bool:
    """Whether page-locked host memory is allowed and speeds copies to this device up."""
    return get_runtime().memory.pinned_memory and accelerators.accelerator_row(device).pinned
