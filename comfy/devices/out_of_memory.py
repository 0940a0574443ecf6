"""What to say when a device is full: what was wanted, what is free, who holds what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from comfy.devices import accelerators, memory
from comfy.devices.loaded_model import LoadedModel, describe

BESIDE = {"patch_bytes": "patches", "hook_bytes": "weights of hooks", "ahead_bytes": "on its way"}
"""What a model holds beside its weights, where it is worth telling."""


class OutOfMemoryReport(torch.OutOfMemoryError):
    """Not enough device memory even at the lowest residency; the message says who held what.

    Custom nodes that catch torch's error, to work in smaller parts, catch this too.
    """


def out_of_memory_text(
    device: torch.device, group: Sequence[LoadedModel], loaded: Sequence[LoadedModel]
) -> str:
    """An explanation of a full device.

    Args:
        device: The device.
        group: Models that were wanted.
        loaded: All that hold memory.
    """
    lines = [
        f"not enough memory on {device} ({accelerators.device_name(device)}): "
        f"{_mib(memory.get_free_memory(device))} free"
    ]
    lines += [f"wanted: {_one_line(describe(entry))}" for entry in group]
    lines += [
        f"held by: {_one_line(describe(entry))}"
        for entry in loaded
        if entry not in group and entry.device == device and not entry.is_dead()
    ]
    lines.append("To mend it: use a smaller model or picture, close other programs, or start with")
    return "; ".join(lines) + " --lowvram or --novram."


def _one_line(row: dict[str, Any]) -> str:
    beside = [f", {_mib(row[key])} of {what}" for key, what in BESIDE.items() if row[key] >= 2**19]
    held = f"{_mib(row['size_bytes'])}, {_mib(row['loaded_bytes'])} loaded{''.join(beside)}"
    return f"{row['model']} ({row['dtype']}, {held})"


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"
