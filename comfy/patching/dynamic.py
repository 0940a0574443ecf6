"""ModelPatcherDynamic: the same view, with residency decided weight by weight while it runs.

Loading moves nothing. A layer's weights come to the device at first use, patched once, and stay
while the budget lasts; what does not fit is streamed on every use. Under pressure from other
models what came last goes first. Weights of a memory-mapped file are read from it as they are
needed, so host memory holds what is used, not what exists. Modules that cannot stream are loaded
as in the classic patcher, and so is everything on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from comfy.devices import accelerators, casting
from comfy.devices.memory import tensor_bytes
from comfy.devices.runtime import get_runtime
from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.ops.streaming import StreamPlan, Tensors
from comfy.patching.equality import same_objects
from comfy.patching.lowvram import LowVramPatch
from comfy.patching.module_loading import LoadEntry, patched_apart
from comfy.patching.patcher import ModelPatcher
from comfy.weights.mapped_file import release_pages

UNBOUNDED = 1 << 62
"""A budget larger than any device."""


@dataclass
class Held:
    """Weights of one layer kept on the device.

    Attributes:
        tensors: (weight, bias), patched.
        size: Their bytes.
        name: Dotted name of the layer.
    """

    tensors: Tensors
    size: int
    name: str


@dataclass
class LayerPatches:
    """How the weights of one layer change on arrival.

    Attributes:
        name: Dotted name of the layer.
        functions: Patch functions of (weight, bias); None leaves one as it is.
        shown: The patches they apply, to tell whether a kept weight is still right.
    """

    name: str
    functions: tuple[Callable[..., Any] | None, Callable[..., Any] | None]
    shown: tuple[tuple[Any, ...], tuple[Any, ...]]


@dataclass(eq=False)
class KeepingPlan(StreamPlan):
    """A transfer plan that keeps what it brought, up to `budget` bytes, first come first kept."""

    budget: int = UNBOUNDED
    held: dict[int, Held] = field(default_factory=dict)
    patches: dict[int, LayerPatches] = field(default_factory=dict)

    def holds(self, layer: Any) -> bool:
        """See the base."""
        return id(layer) in self.held

    def _arrive(self, layer: Any) -> Tensors:
        held = self.held.get(id(layer))
        if held is not None:
            return held.tensors
        sources = (layer.weight, getattr(layer, "bias", None))
        tensors = super()._arrive(layer)
        patches = self.patches.get(id(layer))
        if patches is not None:
            weight, bias = (
                tensor if function is None or tensor is None else function(tensor)
                for tensor, function in zip(tensors, patches.functions)
            )
            tensors = (weight, bias)
        self._keep(layer, tensors, sources, patches.name if patches is not None else "")
        return tensors

    def _keep(self, layer: Any, tensors: Tensors, sources: Tensors, name: str) -> None:
        size = sum(tensor_bytes(t) for t in tensors if t is not None)
        if self.held_bytes + size > self.budget:
            return
        if self.streams:  # what is kept is let go at any time, also while kernels still read it
            current = casting.current_stream(self.device)
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(current)
        self.held[id(layer)] = Held(tensors, size, name)
        self.held_bytes += size
        for source in sources:
            if source is not None:
                release_pages(source)

    def set_patches(self, layer: Any, patches: LayerPatches) -> None:
        """Change what is done to a layer on arrival; a kept weight that is no longer right goes."""
        known = self.patches.get(id(layer))
        same = known is not None and all(
            same_objects(a, b) for a, b in zip(known.shown, patches.shown)
        )
        if not same:
            self.drop(id(layer))
        self.patches[id(layer)] = patches

    def drop(self, layer_id: int) -> int:
        """See the base."""
        held = self.held.pop(layer_id, None)
        if held is None:
            return 0
        self.held_bytes -= held.size
        return held.size

    def bring(self, layer: Any) -> int:
        """Have a layer's weights on the device before their first use; returns the bytes added."""
        if getattr(layer, "stream_plan", None) is not self:
            return 0  # it cannot stream, and is there already
        before = self.held_bytes
        self._arrive(layer)
        return self.held_bytes - before

    def evict(self, wanted: int) -> int:
        """Free up to `wanted` bytes, what came last first; returns the bytes freed."""
        freed = 0
        while freed < wanted and self.held:
            freed += self.drop(next(reversed(self.held)))
        return freed

    def close(self) -> None:
        """See the base."""
        super().close()
        self.held.clear()
        self.patches.clear()
        self.held_bytes = 0


class ModelPatcherDynamic(ModelPatcher):
    """See the module."""

    def _clone_class(self, disable_dynamic: bool) -> type[ModelPatcher]:
        return ModelPatcher if disable_dynamic else self.__class__

    def load(
        self,
        device_to: torch.device | None = None,
        lowvram_model_memory: int = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        """Prepare weights to come on demand; arguments as in the base.

        Only `full_load` brings everything now.
        """
        if device_to is None or accelerators.with_index(device_to).type == "cpu":
            super().load(device_to, lowvram_model_memory, force_patch_weights, full_load)
            return
        unbounded = full_load or lowvram_model_memory <= 0
        budget = UNBOUNDED if unbounded else lowvram_model_memory
        super().load(device_to, 1, force_patch_weights, False)
        plan = self.residence.plan
        if isinstance(plan, KeepingPlan):
            fixed = self.residence.loaded_bytes - plan.held_bytes
            plan.budget = max(0, budget - fixed)
            plan.evict(plan.held_bytes - plan.budget)
            if full_load:
                self.bring_all_weights()
            self._publish_state()

    def bring_all_weights(self) -> None:
        """Have every weight on the device now, for a run that must not wait for any."""
        plan = self.residence.plan
        if not isinstance(plan, KeepingPlan):
            return
        plan.budget = UNBOUNDED
        with self._restored_on_failure():
            for name in self.residence.streaming:
                throw_exception_if_processing_interrupted()
                layer = self.model.get_submodule(name)
                self.residence.moved_bytes += plan.bring(layer)
        self._publish_state()

    def _other_kind_of_plan(self) -> bool:
        plan = self.residence.plan
        if plan is None or plan.device.type == "cpu":
            return super()._other_kind_of_plan()
        return not isinstance(plan, KeepingPlan)

    def _make_streamed(self, entry: LoadEntry, force_patch: bool = False, pin: bool = True) -> None:
        if self.residence.device is None or self.residence.device.type == "cpu":
            super()._make_streamed(entry, force_patch, pin)  # nothing arrives where weights rest
            return
        self.residence.release(entry.name, entry.module)  # also what another view attached
        plan = self.residence.open_plan(self.residence.device, KeepingPlan)
        assert isinstance(plan, KeepingPlan)
        self._leave_device(entry)
        patches = self._layer_patches(entry)
        if force_patch:  # to be read where they rest, as by saving: nothing is left to do later
            plan.drop(id(entry.module))
            patches = LayerPatches(entry.name, (None, None), ((), ()))
        plan.set_patches(entry.module, patches)
        self._patch_at_rest(entry, everything=force_patch)
        self._attach_functions(entry, streamed=True, patched=False)
        settings = {"stream_plan": plan, "patched_on_arrival": any(patches.shown)}
        self.residence.stream(entry.name, entry.module, settings)

    def _travels_patched(self, key: str) -> bool:  # noqa: ARG002 - as the base
        """What is kept once it arrived is patched then, whatever the size of the patches."""
        return False

    def _layer_patches(self, entry: LoadEntry) -> LayerPatches:
        prefix = f"{entry.name}." if entry.name else ""
        functions: list[LowVramPatch | None] = []
        shown: list[tuple[Any, ...]] = []
        for name in ("weight", "bias"):
            key = prefix + name
            arrives = key in self.patches and not patched_apart(entry.module, name)
            functions.append(self._patch_at_use(key, keep=False) if arrives else None)
            shown.append(tuple(self.patches[key]) if arrives else ())
        return LayerPatches(entry.name, (functions[0], functions[1]), (shown[0], shown[1]))

    def partially_unload(
        self, device_to: torch.device, memory_to_free: int = 0, force_patch_weights: bool = False
    ) -> int:
        """Evict kept weights; the rest of the bytes wanted stays the caller's to find."""
        plan = self.residence.plan
        if not isinstance(plan, KeepingPlan):
            return super().partially_unload(device_to, memory_to_free, force_patch_weights)
        self.clean_hooks()
        plan.forget_order()
        freed = plan.evict(memory_to_free)
        plan.budget = plan.held_bytes
        self._publish_state()
        return freed

    def partially_load(
        self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False
    ) -> int:
        """Raise the budget by `extra_memory` bytes; weights come as they are used.

        Returns:
            The bytes that may become resident, as the planner counts them.
        """
        before = self.residence.loaded_on(device_to)
        budget = before + extra_memory
        full = budget >= self.model_size()
        everything = 0 if accelerators.with_index(device_to).type == "cpu" else UNBOUNDED
        self.patch_model(
            device_to,
            lowvram_model_memory=everything if full else max(budget, 1),
            force_patch_weights=force_patch_weights,
        )
        return min(budget, self.model_size()) - before


def core_patcher_class() -> type[ModelPatcher]:
    """The patcher new models are wrapped in: a start-up choice, classic unless asked otherwise."""
    return ModelPatcherDynamic if get_runtime().memory.dynamic_residency else ModelPatcher
