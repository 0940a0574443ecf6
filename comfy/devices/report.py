"""What the machine offers and what to say when it is not enough: plain data for other layers."""

from __future__ import annotations

import os
import re
from typing import Any

import psutil
import torch

from comfy.devices import accelerators, memory, residency
from comfy.devices.out_of_memory import OutOfMemoryReport
from comfy.devices.runtime import primary_device

ASKED = re.compile(r"(?:tried to |unable to )allocate ([\d.]+) ?(bytes|[KMGTPE]iB)", re.IGNORECASE)
"""How torch and NumPy say what was asked for: `You tried to allocate 4096 bytes`."""

WORTH_NAMING = 100 * memory.MIB  # what a model must hold to be named among those that hold memory
UNLOADED = "All models were unloaded, and the next prompt starts with that memory"

UNITS = {"bytes": 1} | {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTPE", 1)}


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
    """Unloads all models after an out-of-memory error and explains it; None for any other error.

    The one place that puts lack of memory into words for people, whoever noticed it.
    """
    if not memory.is_oom(error):
        return None
    text = str(error).strip()
    if isinstance(error, OutOfMemoryReport):  # it has said all the rest
        residency.unload_all_models()
        return f"{text} {UNLOADED}."
    if isinstance(error, memory.NotEnoughMemory):
        residency.unload_all_models()
        return f"Not enough memory: {text}. {UNLOADED}."
    what = f"Memory ran out{_asked(text)}. {_what_there_is()}"
    said = f" ({_short(text)})" if text else ""
    residency.unload_all_models()
    return (
        f"{what} {UNLOADED}. Use a smaller picture, batch, length or model, or start with "
        f"--lowvram.{said}"
    )


def _asked(text: str) -> str:
    """What the allocator was asked for, where it says so."""
    found = ASKED.search(text)
    if found is None:
        return ""
    size_bytes = float(found[1]) * UNITS.get(found[2], 1)
    return f": {memory.in_gib(size_bytes)} were asked for at once"


def _what_there_is() -> str:
    """What is free where, and who holds the rest."""
    places = dict.fromkeys((primary_device(), torch.device("cpu")))
    rows = [
        f"{memory.in_gib(memory.get_free_memory(place))} of "
        f"{memory.in_gib(memory.get_total_memory(place))} are free on {place}"
        for place in places
    ]
    rows += [
        f"{owner}: {memory.in_gib(held)}"
        for owner, held in memory_by_owner().items()
        if held > WORTH_NAMING
    ]
    process = psutil.Process(os.getpid()).memory_info().rss
    return f"{'; '.join(rows)}; this process in main memory: {memory.in_gib(process)}."


def _short(text: str) -> str:
    """The first line of a back end's text, without the place in its source."""
    line = re.sub(r"^\[enforce fail at [^]]*\][^.]*\. ", "", text.splitlines()[0])
    return line if len(line) <= 200 else f"{line[:200]}..."
