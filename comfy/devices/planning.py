"""Decisions about models on a device: which goes first, and how much room each gets.

Nothing is loaded or freed here; `comfy.devices.residency` does that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from comfy.devices import memory
from comfy.devices.loaded_model import LoadedModel
from comfy.devices.policies import VRAMState
from comfy.devices.prompt_models import PROMPT_MODELS
from comfy.devices.running import is_running
from comfy.devices.runtime import get_runtime


def eviction_order(entries: Iterable[LoadedModel]) -> list[LoadedModel]:
    """Models that may go, the first to go first.

    Least recently used first, models of the running prompt after all others. Where that rule has
    failed (a model evicted before was wanted again, as in a loop over more models than fit), the
    model whose next use is expected last goes first.
    """
    entries = list(entries)
    if entries and all(e.regrets and e.gap is not None for e in entries):
        return sorted(entries, key=lambda e: (is_running(e), -(e.used_at + (e.gap or 0))))
    wanted = PROMPT_MODELS.references
    return sorted(
        entries,
        key=lambda e: (is_running(e), e.currently_used, wanted(e.real_model()), e.used_at),
    )


def room_for_weights(group: Sequence[LoadedModel], device: torch.device, needed: float) -> float:
    """Bytes that weights of models may take beside those already resident.

    What the run needs comes first, also from weights that are there, as long as the least share of
    weights stays; fewer than 0 where some of those resident have to go.

    Args:
        group: Models needed together.
        device: Their device.
        needed: Bytes the run cannot do without beside the weights.
    """
    resident = sum(resident_on(entry, device) for entry in group)
    whole = memory.get_free_memory(device) + resident
    least = min(whole * memory.MIN_WEIGHT_MEMORY_RATIO, whole - memory.inference_floor(device))
    return max(0, whole - needed, least) - resident


def shares(
    group: Sequence[LoadedModel], device: torch.device, room: float, full: bool
) -> list[tuple[LoadedModel, int]]:
    """How many bytes each model may add to what it has resident; 0 stands for all of it.

    Args:
        group: Models needed together.
        device: Their device.
        room: Bytes that weights may take beside those already resident; fewer than 0 where some
            of these have to go.
        full: Everything must be resident.
    """
    missing = sum(entry.model_memory_required(device) for entry in group)
    state = get_runtime().vram_state
    if full or (missing <= room and state != VRAMState.NO_VRAM):
        return [(entry, 0) for entry in group]
    resident = {id(entry): resident_on(entry, device) for entry in group}
    left = 0.0 if state == VRAMState.NO_VRAM else room + sum(resident.values())
    left -= max(entry.reserve_for_streaming() for entry in group)
    out = []
    for entry in sorted(group, key=lambda e: e.model_memory()):
        size = entry.model_memory()
        if size <= left:
            out.append((entry, 0))
            left -= size
        else:
            out.append((entry, (int(max(left, 1)) - resident[id(entry)]) or 1))
            left = 0
    return out


def resident_on(entry: LoadedModel, device: torch.device) -> int:
    """Bytes of an entry's weights that are on a device."""
    return max(0, entry.model_memory() - entry.model_memory_required(device))
