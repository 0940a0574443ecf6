"""Facts about kinds of accelerator, and the two torch interfaces every other module goes through.

A row says what a device *type* can do; what one device can do (bfloat16 on this card?) is asked of
it on first use and remembered. Types without a row get cautious answers from `torch.accelerator`,
so a new back end works before anyone has written its row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Accelerator:
    """What one device type can do.

    Attributes:
        type: torch device type.
        fp16: Computes in float16 without falling back to float32.
        bf16: Computes in bfloat16; None asks the device.
        fp64: Has float64 at all.
        fp8_storage: Can hold and cast float8 tensors.
        non_blocking: Copies may be issued without waiting.
        streams: Copies and kernels may overlap on separate streams.
        pinned: Page-locked host memory speeds its copies up.
        unified_memory: Shares its memory with the CPU.
        autocast: Type name for torch.autocast, when it differs.
    """

    type: str
    fp16: bool = True
    bf16: bool | None = None
    fp64: bool = True
    fp8_storage: bool = True
    non_blocking: bool = True
    streams: bool = True
    pinned: bool = True
    unified_memory: bool = False
    autocast: str | None = None


ACCELERATORS: dict[str, Accelerator] = {
    row.type: row
    for row in (
        Accelerator("cuda"),
        Accelerator("xpu", bf16=True, streams=True, pinned=False),
        Accelerator(
            "mps", bf16=True, fp64=False, fp8_storage=False, non_blocking=False, streams=False,
            pinned=False, unified_memory=True, autocast="cpu",
        ),
        Accelerator("npu", bf16=True, fp8_storage=False, pinned=False),
        Accelerator("mlu", bf16=True, fp8_storage=False, pinned=False),
        Accelerator(
            "privateuseone", fp16=False, bf16=False, fp64=False, fp8_storage=False,
            non_blocking=False, streams=False, pinned=False,
        ),
        Accelerator(
            "cpu", fp16=False, bf16=False, non_blocking=False, streams=False, pinned=False,
            unified_memory=True,
        ),
    )
}  # fmt: skip

SLOW_FP16_CARDS = (
    "1660", "1650", "1630", "T500", "T550", "T600", "MX550", "MX450", "CMP 30HX", "T2000", "T1000",
    "T1200",
)  # fmt: skip
"""Turing cards without tensor cores whose float16 path gives NaN or no speed."""


def accelerator_row(device: torch.device) -> Accelerator:
    """The table row of a device's type, or a generic one for a type without a row."""
    return ACCELERATORS.get(device.type) or Accelerator(device.type)


def device_module(device: torch.device) -> Any:
    """The torch module of a device type (memory_stats, Stream, synchronize...)."""
    return torch.get_device_module(device)


def find_accelerator() -> torch.device | None:
    """The current accelerator with its index, or None on a machine without one."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    return with_index(device)


def with_index(device: torch.device) -> torch.device:
    """The same device with an explicit index when its type has several."""
    if device.type in ("cpu", "mps", "meta") or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def accelerator_devices() -> list[torch.device]:
    """All devices of the current accelerator type; empty without one."""
    first = find_accelerator()
    if first is None:
        return []
    if first.index is None:
        return [first]
    return [torch.device(first.type, i) for i in range(torch.accelerator.device_count())]


@functools.cache
def device_name(device: torch.device) -> str:
    """Human name of a device, its type when the back end knows none."""
    if device.type == "cpu":
        return "cpu"
    ask = getattr(device_module(device), "get_device_name", None)
    return str(ask(device)) if ask is not None else device.type


@functools.cache
def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """(major, minor) of devices that have the notion, else None."""
    ask = getattr(device_module(device), "get_device_capability", None)
    if device.type == "cpu" or ask is None or getattr(torch.version, "hip", None):
        return None
    answer = ask(device)
    return (int(answer[0]), int(answer[1])) if isinstance(answer, tuple) else None


@functools.cache
def has_fast_fp16(device: torch.device) -> bool:
    """Whether float16 is worth computing in on this device."""
    if not accelerator_row(device).fp16:
        return False
    capability = compute_capability(device)
    if capability is None:
        return True
    if any(card in device_name(device) for card in SLOW_FP16_CARDS):
        return False
    return capability >= (7, 0) or capability == (6, 0)


@functools.cache
def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16 natively."""
    row = accelerator_row(device)
    if row.bf16 is not None:
        return row.bf16
    capability = compute_capability(device)
    if capability is not None:
        return capability >= (8, 0)
    ask = getattr(device_module(device), "is_bf16_supported", None)
    return bool(ask()) if ask is not None else False


@functools.cache
def has_fp8_compute(device: torch.device) -> bool:
    """Whether the device multiplies float8 matrices (Ada, Hopper and newer)."""
    capability = compute_capability(device)
    return device.type == "cuda" and capability is not None and capability >= (8, 9)
