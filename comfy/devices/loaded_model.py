"""One base module in the residency planner's books: its view, its bytes, its use."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any

import torch

from comfy.devices import accelerators

logger = logging.getLogger(__name__)


class LoadedModel:
    """A base module that a device holds, wholly or in part, shown through one patcher.

    The patcher is held weakly: when all views of a module are gone, so are its weights, and the
    entry is dead. When only this view is gone, another living one takes its place.

    Attributes:
        device: Where the module runs.
        currently_used: Needed by the run that is in progress.
        used_at: Tick of the planner's clock at the last use.
        gap: Ticks between the last two uses; None before the second.
        evicted: Memory was taken from the module since its last use.
        regrets: How often it was wanted again after that.
        is_logged: A line said that the module is loaded, since it was last unloaded.
        run_memory: Bytes the last run asked for beside the weights, and those it cannot do
            without, as `residency.load_models_gpu` takes them.
        last_used_s: Monotonic time of the last use, in seconds.
        real_model: Weak reference to the module.
        model_finalizer: Takes the entry off the list of loaded models when the module is freed.
    """

    def __init__(self, model: Any) -> None:
        self._view = weakref.ref(model)
        self.real_model = weakref.ref(model.model)
        self.model_finalizer = weakref.finalize(model.model, _forget_dead)
        self.model_finalizer.atexit = False
        self._views = getattr(getattr(model, "residence", None), "views", None)
        self.device = accelerators.with_index(model.load_device)
        self.currently_used = True
        self.used_at = 0
        self.gap: int | None = None
        self.evicted = False
        self.regrets = 0
        self.is_logged = False
        self.run_memory: tuple[float, float | None] = (0, None)
        self.last_used_s = time.monotonic()

    @property
    def model(self) -> Any | None:
        """The patcher shown, or another living view of the module; None when all are gone."""
        view, module = self._view(), self._module()
        if view is not None and view.model is module:
            return view
        views = [] if self._views is None else [ref() for ref in self._views.valuerefs()]
        view = next((v for v in views if v is not None and v.model is module), None)
        if view is not None:
            self._view = weakref.ref(view)
        return view

    def show(self, model: Any) -> None:
        """Take another view of the same module as the one to load."""
        self._view = weakref.ref(model)
        self.device = accelerators.with_index(model.load_device)

    def mark_used(self, tick: int) -> None:
        """Note a use at `tick` of the planner's clock."""
        if self.used_at:
            self.gap = tick - self.used_at
        self.used_at = tick
        self.regrets += self.evicted
        self.evicted = False
        self.last_used_s = time.monotonic()
        self.currently_used = True

    def is_dead(self) -> bool:
        """Whether the module or all of its views are gone."""
        return self._module() is None or self.model is None

    def _module(self) -> Any | None:
        """The module; custom nodes that take an entry apart put None in the reference's place."""
        return None if self.real_model is None else self.real_model()

    def is_of(self, model: Any) -> bool:
        """Whether a patcher is a view of this entry's module."""
        module = self._module()
        return module is not None and module is model.model

    def model_size(self) -> int:
        """`model_memory`, under the patcher's name for it."""
        return self.model_memory()

    def loaded_size(self) -> int:
        """`model_loaded_memory`, under the patcher's name for it."""
        return self.model_loaded_memory()

    @property
    def offloaded(self) -> int:
        """The bytes between `model_size` and `loaded_size`."""
        return self.model_offloaded_memory()

    def model_memory(self) -> int:
        """Bytes of all weights."""
        model = self.model
        return 0 if model is None else int(model.model_size())

    def model_loaded_memory(self) -> int:
        """Bytes of weights on the device."""
        model = self.model
        return 0 if model is None else int(model.loaded_size())

    def held_memory(self) -> int:
        """Bytes on the device: weights, and patches kept there for streamed ones."""
        state = getattr(self.model, "residence", None)
        beside = state.device_bytes - state.loaded_bytes if state is not None else 0
        return self.model_loaded_memory() + beside

    def model_offloaded_memory(self) -> int:
        """Bytes of weights that are not on the device."""
        return max(0, self.model_memory() - self.model_loaded_memory())

    def model_memory_required(self, device: torch.device) -> int:
        """Bytes that would have to be moved to have everything on `device`."""
        model = self.model
        if model is not None and accelerators.with_index(device) == accelerators.with_index(
            model.current_loaded_device()
        ):
            return self.model_offloaded_memory()
        return self.model_memory()

    def model_load(
        self,
        lowvram_model_memory: int = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> Any:
        """Show the patcher on the device.

        Args:
            lowvram_model_memory: Bytes that may become resident beside those that are; 0 means all.
            force_patch_weights: Patch again even where the same patches are shown.
            full_load: Have every weight there now, also of a patcher that brings them on demand.
        Returns:
            The base module.
        """
        model = self.model
        if model is None:
            raise ReferenceError("the model was freed before it could be loaded")
        before, started = self._moved(model), time.perf_counter()
        model.model_patches_to(self.device)
        dtype = model.model_dtype() if hasattr(model, "model_dtype") else None
        if dtype is not None:
            model.model_patches_to(dtype)
        extra = int(1e32) if lowvram_model_memory == 0 else lowvram_model_memory
        self.model_use_more_vram(extra, force_patch_weights)
        if full_load and hasattr(model, "bring_all_weights"):
            model.bring_all_weights()
        self._log(model, self._moved(model) - before, time.perf_counter() - started)
        return model.model

    def _moved(self, model: Any) -> int:
        """Bytes that loading has written so far; only differences mean something."""
        state = getattr(model, "residence", None)
        return self.model_loaded_memory() if state is None else int(state.moved_bytes)

    def _log(self, model: Any, moved: int, seconds: float) -> None:
        if moved <= 0 and self.is_logged:
            return
        self.is_logged = True
        logger.info(
            "loaded %s to %s: %.1f of %.1f MiB resident, %.1f MiB moved in %.3f s (%.2f GB/s)",
            type(model.model).__name__,
            self.device,
            self.model_loaded_memory() / 2**20,
            self.model_memory() / 2**20,
            moved / 2**20,
            seconds,
            moved / max(seconds, 1e-9) / 1e9,
        )

    def should_reload_model(self, force_patch_weights: bool = False) -> bool:
        """Whether the weights have to be patched again although they are loaded."""
        return force_patch_weights and self.model is not None

    def model_unload(self, memory_to_free: int | None = None, unpatch_weights: bool = True) -> bool:
        """Free device memory.

        Args:
            memory_to_free: Bytes wanted; None, or as much as there is, unloads everything.
            unpatch_weights: Also put the weights back when everything is unloaded.
        Returns:
            Whether the module is now wholly off the device.
        """
        model = self.model
        if model is None:
            return True
        if memory_to_free is not None and memory_to_free < self.model_loaded_memory():
            freed = model.partially_unload(model.offload_device, memory_to_free)
            if freed >= memory_to_free:
                return False
        self.is_logged = False
        try:
            model.detach(unpatch_weights)
        except Exception:
            if self.model_loaded_memory() > 0:
                raise
            logger.exception(
                "%s is unloaded, but code told of it failed", type(model.model).__name__
            )
        return True

    def model_use_more_vram(self, extra_memory: int, force_patch_weights: bool = False) -> int:
        """Let up to `extra_memory` more bytes become resident; returns how many did."""
        model = self.model
        if model is None:
            return 0
        return int(
            model.partially_load(self.device, extra_memory, force_patch_weights=force_patch_weights)
        )

    def reserve_for_streaming(self) -> int:
        """Device bytes that streaming the rest of the module takes beside what is resident."""
        ask = getattr(self.model, "streaming_reserve", None)
        return int(ask()) if ask is not None else 0

    def patching_memory(self) -> int:
        """Device bytes that patching a streamed weight takes while it lasts."""
        ask = getattr(self.model, "patching_memory", None)
        return int(ask()) if ask is not None else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoadedModel) and self._module() is other._module()

    def __hash__(self) -> int:
        return id(self._module())


def _forget_dead() -> None:
    from comfy.devices import residency  # which imports this module

    residency.cleanup_models()


def describe(entry: LoadedModel) -> dict[str, Any]:
    """What an entry holds where, as plain data for logs and the memory endpoint."""
    model = entry.model
    dtype = None if model is None else _dtype_of(model)
    loaded, size = entry.model_loaded_memory(), entry.model_memory()
    held = getattr(model, "residence", None)
    state = "resident" if loaded >= size else "partial" if loaded else "offloaded"
    return {
        "model": type(model.model).__name__ if model is not None else None,
        "device": str(entry.device),
        "dtype": str(dtype).removeprefix("torch.") if dtype is not None else None,
        "size_bytes": size,
        "loaded_bytes": loaded,
        "offloaded_bytes": max(0, size - loaded),
        "patch_bytes": held.patch_bytes if held is not None else 0,
        "hook_bytes": held.hook_bytes if held is not None else 0,
        "ahead_bytes": held.ahead_bytes if held is not None else 0,
        "pinned_bytes": held.pinned_bytes if held is not None else 0,
        "patched_weights": len(getattr(model, "patches", ())),
        "state": state,
        "in_use": entry.currently_used,
        "idle_s": round(time.monotonic() - entry.last_used_s, 3),
    }


def _dtype_of(model: Any) -> torch.dtype | None:
    """The type a patcher names, or else that of its module's first matrix."""
    named = model.model_dtype() if hasattr(model, "model_dtype") else None
    if named is not None:
        return named
    return next((weight.dtype for weight in model.model.parameters() if weight.ndim > 1), None)
