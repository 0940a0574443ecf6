"""What the machine offers and what to say when it is not enough: plain data for other layers."""

from __future__ import annotations

from typing import Any

import torch

from comfy.devices import accelerators, memory, residency
from comfy.devices.runtime import primary_device


def system_stats() -> dict[str, Any]:
    """Versions, memory in bytes and devices, the primary one first: `/system_stats`."""
    primary = primary_device()
    ram = torch.device("cpu")
    listed = [primary] if primary.type == "cpu" else accelerators.accelerator_devices()
    devices = [_describe(device) for device in sorted(listed, key=lambda one: one != primary)]
    system = {
        "ram_total": memory.get_total_memory(ram),
        "ram_free": memory.get_free_memory(ram),
        "pytorch_version": torch.__version__,
    }
    return {"system": system, "devices": devices}


def memory_by_owner() -> dict[str, int]:
    """Bytes that loaded models hold on devices, by model class and device."""
    held: dict[str, int] = {}
    for row in residency.memory_report():
        owner = f"{row['model']} on {row['device']}"
        held[owner] = held.get(owner, 0) + row["loaded_bytes"]
    return held


def _describe(device: torch.device) -> dict[str, Any]:
    total, torch_total = memory.get_total_memory(device, torch_total_too=True)
    free, torch_free = memory.get_free_memory(device, torch_free_too=True)
    return {
        "name": accelerators.device_name(device),
        "type": device.type,
        "index": device.index,
        "vram_total": total,
        "vram_free": free,
        "torch_vram_total": torch_total,
        "torch_vram_free": torch_free,
    }


def free_after_oom(error: BaseException) -> str | None:
    """Unloads all models after an out-of-memory error and says so; None for any other error."""
    if not memory.is_oom(error):
        return None
    residency.unload_all_models()
    return (
        "Memory ran out. All models were unloaded; the next prompt starts with free memory. Use a "
        "smaller picture, batch or model, or start with --lowvram."
    )
