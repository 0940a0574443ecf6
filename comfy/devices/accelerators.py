"""Facts about kinds of accelerator, and the two torch interfaces every other module goes through.

A row says what a device *type* can do; what one device can do (bfloat16 on this card?) is asked of
it on first use and remembered. Types without a row get cautious answers from `torch.accelerator`,
so a new back end works before anyone has written its row.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from comfy.devices import processor


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


ACCELERATORS: dict[str, Accelerator] = {
    row.type: row
    for row in (
        Accelerator("cuda"),
        Accelerator("xpu", bf16=True, streams=True, pinned=False),
        Accelerator(
            "mps", fp64=False, fp8_storage=False, non_blocking=False, streams=False,
            pinned=False, unified_memory=True,
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

AMD_WITHOUT_BF16 = (
    "gfx803", "gfx900", "gfx906", "gfx1010", "gfx1011", "gfx1012", "gfx1030", "gfx1031",
)  # fmt: skip
"""AMD architectures (RDNA2 and older) that only emulate bfloat16."""

MACOS_WITH_BF16 = (14,)
"""First version of macOS whose GPU back end computes in bfloat16."""


def accelerator_row(device: torch.device) -> Accelerator:
    """The table row of a device's type, or a generic one for a type without a row."""
    return ACCELERATORS.get(device.type) or Accelerator(device.type)


def device_module(device: torch.device) -> Any:
    """The torch module of a device type (memory_stats, Stream, synchronize...).

    A type whose back end brings no module gets an empty one, so that callers ask with `getattr`.
    """
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return SimpleNamespace()


def find_accelerator() -> torch.device | None:
    """The current accelerator with its index, or None on a machine without one."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    return with_index(device)


def with_index(device: torch.device | str | int) -> torch.device:
    """A device as tensors on it report it: with an index where its type has several.

    Custom nodes write `torch.device("cuda")`; a tensor there is on `cuda:0`, which is not equal.
    """
    device = torch.device(device)
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    if not torch.accelerator.is_available():
        return torch.device(device.type, 0)
    current = torch.accelerator.current_accelerator()
    here = current is not None and current.type == device.type
    return torch.device(device.type, torch.accelerator.current_device_index() if here else 0)


def accelerator_devices() -> list[torch.device]:
    """All devices of the current accelerator type; empty without one."""
    first = find_accelerator()
    if first is None:
        return []
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
    if device.type == "mps":
        return macos_version() >= MACOS_WITH_BF16
    capability = compute_capability(device)
    if capability is not None:
        return capability >= (8, 0)
    if amd_architecture(device) in AMD_WITHOUT_BF16:
        return False
    ask = getattr(device_module(device), "is_bf16_supported", None)
    return bool(ask()) if ask is not None else False


@functools.cache
def amd_architecture(device: torch.device) -> str | None:
    """Architecture of an AMD card such as "gfx1100"; None for other devices."""
    if getattr(torch.version, "hip", None) is None or device.type != "cuda":
        return None
    properties = device_module(device).get_device_properties(device)
    return str(getattr(properties, "gcnArchName", "")).partition(":")[0] or None


def macos_version() -> tuple[int, ...]:
    """Version of macOS; (0,) on other systems."""
    numbers = platform.mac_ver()[0].split(".")
    return tuple(int(number) for number in numbers if number.isdigit()) or (0,)


@functools.cache
def has_fp8_compute(device: torch.device) -> bool:
    """Whether the device multiplies float8 matrices (Ada, Hopper and newer)."""
    capability = compute_capability(device)
    return capability is not None and capability >= (8, 9)


def cpu_multiplies_bf16() -> bool:
    """Whether the processor's bfloat16 products are faster than its float32 ones."""
    return processor.multiplies_bf16()


def torch_version() -> str:
    """Version of torch, build included."""
    return str(torch.__version__)


def torch_version_numeric() -> tuple[int, int]:
    """(major, minor) of torch."""
    major, minor = torch_version().split(".")[:2]
    return int(major), int(minor)
