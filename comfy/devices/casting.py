"""Moving tensors between devices and types, and the copy streams that do it."""

from __future__ import annotations

from typing import Any

import torch

from comfy.devices import accelerators
from comfy.devices.runtime import get_runtime


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
    if stream is None:
        return weight.to(device, dtype, non_blocking=non_blocking, copy=copy)
    with on_stream(device, stream):
        return weight.to(device, dtype, non_blocking=non_blocking, copy=copy)


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
