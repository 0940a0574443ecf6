"""Which models are on which device: one plan for a set of models needed together.

`load_models_gpu` frees what others hold, least recently used first and no more than needed, then
gives every wanted model its share: all of it when everything fits, else the small ones whole and
the rest of the room to the largest, whose remaining weights are streamed at use. Nothing the run
needs is unloaded; a model already there in the wanted state costs nothing.
"""

from __future__ import annotations

import gc
import itertools
import logging
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from comfy.devices import accelerators, memory
from comfy.devices.heap import HEAP
from comfy.devices.loaded_model import LoadedModel, describe
from comfy.devices.out_of_memory import OutOfMemoryReport, out_of_memory_text
from comfy.devices.planning import eviction_order, room_for_weights, shares
from comfy.devices.policies import VRAMState
from comfy.devices.prompt_models import PROMPT_MODELS
from comfy.devices.running import is_running, make_smaller, run_of, running
from comfy.devices.runtime import get_runtime

logger = logging.getLogger(__name__)

current_loaded_models: list[LoadedModel] = []
"""Models that hold device memory, most recently used first; custom nodes iterate and edit it."""

EVERYTHING = 1e30
"""More bytes than any device has: asks for all memory to be freed."""

_clock = itertools.count(1)


# -- what is loaded --------------------------------------------------------------------------


def loaded_models(only_currently_used: bool = False) -> list[Any]:
    """The patchers of all loaded models."""
    entries = [e for e in current_loaded_models if e.currently_used or not only_currently_used]
    return [e.model for e in entries if e.model is not None]


def memory_report() -> list[dict[str, Any]]:
    """Who holds what where: one plain dict per loaded model."""
    return [describe(entry) for entry in list(current_loaded_models) if not entry.is_dead()]


def cleanup_models() -> None:
    """Forget entries whose modules are gone."""
    current_loaded_models[:] = [e for e in current_loaded_models if not e.is_dead()]


def cleanup_models_gc() -> None:
    """Forget dead entries, after collecting garbage when a view died but its module lives on."""
    if any(entry.model is None and entry.real_model is not None and entry.real_model() is not None
           for entry in current_loaded_models):  # fmt: skip
        gc.collect()
        memory.soft_empty_cache()
    cleanup_models()


def _find(model: Any) -> LoadedModel | None:
    return next((entry for entry in current_loaded_models if entry.is_of(model)), None)


# -- freeing ---------------------------------------------------------------------------------


def free_memory(
    memory_required: float,
    device: torch.device,
    keep_loaded: Sequence[Any] = (),
    **kwargs: Any,  # noqa: ARG001 - newer servers pass hints that have no meaning here
) -> list[LoadedModel]:
    """Unload until `memory_required` bytes of a device are free.

    Models are taken least recently used first, and the last one only in part when that is enough;
    those that a call under way runs on last, and they go on streamed.

    Args:
        memory_required: Bytes wanted free.
        device: The device.
        keep_loaded: Entries or patchers that must stay as they are.
    Returns:
        The entries that were unloaded completely.
    """
    cleanup_models()
    device = accelerators.with_index(device)
    smart = get_runtime().memory.smart_memory
    unloaded: list[LoadedModel] = []
    for entry in _by_eviction(device, keep_loaded):
        missing = memory_required - memory.get_free_memory(device)
        if smart and missing <= 0:
            break
        entry.evicted = True
        if is_running(entry):
            if missing > 0:
                make_smaller(entry, int(missing))
            continue
        in_part = smart and missing < memory_required and memory_required < EVERYTHING
        if entry.model_unload(int(missing) if in_part else None):
            current_loaded_models.remove(entry)
            unloaded.append(entry)
    if unloaded:
        memory.soft_empty_cache()
    elif get_runtime().vram_state != VRAMState.HIGH_VRAM and device.type != "cpu":
        free, cached = memory.get_free_memory(device, torch_free_too=True)
        if cached > free * 0.25:
            memory.soft_empty_cache()
    return unloaded


_known: weakref.WeakKeyDictionary[Any, LoadedModel] = weakref.WeakKeyDictionary()
"""The entry of every living module that was ever loaded, so that its history outlives eviction."""


def _by_eviction(device: torch.device, keep: Sequence[Any]) -> list[LoadedModel]:
    """Entries of a device that may go, the first to go first."""
    kept = [k if isinstance(k, LoadedModel) else _find(k) for k in keep]
    return eviction_order(
        e
        for e in current_loaded_models
        if e.device == device and not any(e is k for k in kept) and e.held_memory() > 0
    )


def unload_all_models() -> None:
    """Free everything on every device, and show no view any more.

    What a call under way runs on goes on streamed.
    """
    for entry in list(current_loaded_models):
        if is_running(entry):
            make_smaller(entry, int(EVERYTHING))
        else:
            entry.model_unload()
    current_loaded_models[:] = [e for e in current_loaded_models if is_running(e)]
    memory.soft_empty_cache()


def unload_model_clones(model: Any) -> None:
    """Unload whatever view of a patcher's module is loaded, but what a call under way runs on."""
    entry = _find(model)
    if entry is not None and is_running(entry):
        make_smaller(entry, int(EVERYTHING))
    elif entry is not None:
        entry.model_unload()
        current_loaded_models.remove(entry)


def unload_idle(now_s: float | None = None) -> list[LoadedModel]:
    """Unload models nobody used for the time the policy sets; returns them."""
    limit = get_runtime().memory.idle_unload_s
    if limit is None:
        return []
    now = time.monotonic() if now_s is None else now_s
    running = PROMPT_MODELS.is_running
    idle = [
        e
        for e in current_loaded_models
        if now - e.last_used_s > limit and not (running and e.currently_used)
    ]
    for entry in idle:
        entry.model_unload()
        current_loaded_models.remove(entry)
    if idle:
        memory.collect_garbage()
    return idle


def use_more_memory(
    extra_memory: float, loaded_models: Iterable[LoadedModel], device: torch.device
) -> None:
    """Let models of a device become resident further, in order, within `extra_memory` bytes."""
    for entry in loaded_models:
        if entry.device == accelerators.with_index(device) and extra_memory > 0:
            extra_memory -= entry.model_use_more_vram(int(extra_memory))


def offloaded_memory(loaded_models: Iterable[LoadedModel], device: torch.device) -> int:
    """Bytes of a device's models that are not on it."""
    wanted = accelerators.with_index(device)
    return sum(e.model_offloaded_memory() for e in loaded_models if e.device == wanted)


# -- loading ---------------------------------------------------------------------------------


def load_model_gpu(model: Any) -> None:
    """`load_models_gpu` for one model."""
    load_models_gpu([model])


def load_models_gpu(
    models: Iterable[Any],
    memory_required: float = 0,
    force_patch_weights: bool = False,
    minimum_memory_required: float | None = None,
    force_full_load: bool = False,
) -> None:
    """Have a set of models ready to run together.

    Args:
        models: Patchers; patchers that their options or additional models name are loaded too.
        memory_required: Bytes the run would like beside the weights.
        force_patch_weights: Patch weights again even where the same patches are shown.
        minimum_memory_required: Bytes the run cannot do without; None means `memory_required`.
        force_full_load: Never stream; fail when a model does not fit.
    Raises:
        OutOfMemoryReport: Not even the lowest residency fits.
    """
    cleanup_models_gc()
    HEAP.tidy()
    entries = [_entry_for(model) for model in _expand(models)]
    for entry in list(current_loaded_models):
        entry.currently_used = is_running(entry) or any(entry is wanted for wanted in entries)
    for entry in entries:
        entry.run_memory = (memory_required, minimum_memory_required)
    for device in {entry.device for entry in entries}:
        group = [entry for entry in entries if entry.device == device]
        if device.type == "cpu":
            for entry in group:
                entry.model_load(0, force_patch_weights)
        else:
            full = force_full_load or get_runtime().vram_state == VRAMState.HIGH_VRAM
            reserved, floor = memory.reserve_of(device), memory.inference_floor(device)
            wished = max(floor, memory_required + reserved)
            needed = wished if minimum_memory_required is None else max(
                floor, minimum_memory_required + reserved
            )  # fmt: skip
            _load_group(group, device, wished, needed, force_patch_weights, full)
    for entry in entries:
        run = run_of(entry)
        if run is not None:
            run.show_hooks(entry.model)


def load_for_run(models: Sequence[Any], instead_of: float = 0) -> None:
    """Load models for a run under way, which was planned before another one came in between.

    Args:
        models: All that the run needs from here on.
        instead_of: Bytes the run asked for beside the weights, which some of these models are.
    """
    entries = [e for e in current_loaded_models if any(e.is_of(m) for m in models)]
    wished = max((e.run_memory[0] for e in entries), default=0)
    needed = max((a if b is None else b for a, b in (e.run_memory for e in entries)), default=0)
    load_models_gpu(models, max(0, wished - instead_of),
                    minimum_memory_required=max(0, needed - instead_of))  # fmt: skip
    for entry in entries:
        entry.run_memory = (wished, needed)  # what the run asked for, should this be said again


def _expand(models: Iterable[Any]) -> list[Any]:
    """The models, and those their options and extensions name, each base module once."""
    found: list[Any] = []
    for model in models:
        extra = list(model.model_patches_models())
        if hasattr(model, "get_nested_additional_models"):  # custom nodes bring simpler patchers
            extra += model.get_nested_additional_models()
        for candidate in [model, *extra]:
            if not any(candidate.model is seen.model for seen in found):
                found.append(candidate)
    return found


def _entry_for(model: Any) -> LoadedModel:
    """The entry of a model's module, moved to the front and showing this view."""
    entry = _find(model)
    if entry is not None:
        current_loaded_models.remove(entry)
    else:
        known = _known.get(model.model)
        if known is None or not known.is_of(model):  # code outside may have taken it apart
            known = _known[model.model] = LoadedModel(model)
        entry = known
    entry.show(model)
    entry.mark_used(next(_clock))
    current_loaded_models.insert(0, entry)
    return entry


def _load_group(
    group: list[LoadedModel],
    device: torch.device,
    wished: float,
    needed: float,
    force_patch_weights: bool,
    full: bool,
) -> None:
    """Load the models of one device; on an out-of-memory error once more with half the room."""
    missing = sum(entry.model_memory_required(device) for entry in group)
    free_memory(missing * 1.02 + wished, device, keep_loaded=group)
    needed = max(needed, *(entry.patching_memory() for entry in group))
    room = room_for_weights(group, device, needed)
    for attempt in (0, 1):
        try:
            for entry, extra in shares(group, device, room, full):
                entry.model_load(extra, force_patch_weights, full)
            return
        except (RuntimeError, MemoryError) as error:
            if not memory.is_oom(error):
                raise
            error.__traceback__ = None  # its frames hold the tensors of the failed attempt
            for entry in group:
                entry.model_unload()
            free_memory(EVERYTHING, device, keep_loaded=group)
            room = (memory.get_free_memory(device) - needed) / 2
            if attempt or full:
                _go_on(group)
                raise OutOfMemoryReport(
                    out_of_memory_text(device, group, current_loaded_models)
                ) from error
            logger.warning("out of memory while loading to %s; trying again with less", device)


def _go_on(group: Sequence[LoadedModel]) -> None:
    """Have models that a call under way runs on streamed again, if it can do without the others."""
    for run in {run for entry in group if (run := run_of(entry)) is not None}:
        try:
            run.show()
        except (RuntimeError, MemoryError) as error:
            if not memory.is_oom(error):
                raise


T = TypeVar("T")


def run_or_make_room(
    model: Any, call: Callable[[], T], smaller: Callable[[], T] | None = None
) -> T:
    """Run a call on a loaded model; when memory runs out, make room and run it once more.

    Args:
        model: Patcher the call runs on.
        call: Must give the same result when run again.
        smaller: What to run the second time, where there is a way that takes less memory; without
            it half of the model's resident weights are given up.
    Raises:
        OutOfMemoryReport: There was not enough memory the second time either.
        NotEnoughMemory: The call itself has found that no room would do.
    """
    needed = [e for e in current_loaded_models if e.currently_used or e.is_of(model)]
    with running(model, needed) as run:
        for last, attempt in enumerate((call, smaller or call)):
            try:
                if last:
                    run.show()
                return attempt()
            except OutOfMemoryReport:  # a part of the call has tried all this
                raise
            except (RuntimeError, MemoryError) as error:
                if not memory.is_oom(error):
                    raise
                if smaller is None and isinstance(error, memory.NotEnoughMemory):
                    raise  # it has been told what there is, and more room would not do
                text = (str(error) or "MemoryError").splitlines()[0]
                traceback.clear_frames(error.__traceback__)  # they hold the attempt's tensors
                error.__traceback__ = None
            if not last:
                logger.warning("out of memory (%s); unloading what is not needed and trying again"
                               "%s", text, " in smaller parts" if smaller else "")  # fmt: skip
                make_room(model, keep_resident=smaller is not None)
    entry = _find(model)
    group = [entry] if entry is not None else []
    device = accelerators.with_index(model.load_device)
    raise OutOfMemoryReport(out_of_memory_text(device, group, current_loaded_models))


def make_room(model: Any, keep_resident: bool = False) -> None:
    """Unload everything the present run does not need.

    Args:
        model: Patcher of the run.
        keep_resident: Leave the run's weights where they are; else half of the resident ones of
            each of its models go too.
    """
    device = accelerators.with_index(model.load_device)
    needed = [entry for entry in current_loaded_models if entry.currently_used]
    free_memory(EVERYTHING, device, keep_loaded=[model, *needed])
    if not keep_resident:
        model.partially_unload(model.offload_device, model.loaded_size() // 2)
        for entry in needed:
            if entry.device == device and not entry.is_of(model):
                make_smaller(entry, entry.model_loaded_memory() // 2)
    memory.collect_garbage()
