"""Making a base module show a view on a device, and taking that back.

A module with weights of its own is either resident (its weights, patched, are on the load device)
or streamed (they stay where they rest and travel at use). `load` decides by a budget of bytes,
largest modules first, and changes only what differs from the present state; so switching between
views of one module moves the weights whose patches differ and no others. Any exception on the way
puts every weight back before it goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from comfy.devices import accelerators
from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.ops.cast import is_castable
from comfy.ops.streaming import StreamPlan
from comfy.patching import sharing
from comfy.patching.hook_group import HookGroup
from comfy.patching.hook_patches import HookPatching
from comfy.patching.injections import Injections
from comfy.patching.lowvram import LowVramPatch
from comfy.patching.module_loading import LoadEntry, ModuleLoading
from comfy.patching.wrappers import CallbacksMP

logger = logging.getLogger(__name__)


class WeightLoading(ModuleLoading, Injections, HookPatching):
    """The physical half of a patcher; `ModelPatcher` adds the logical half."""

    patches_uuid: Any
    object_patches: dict[str, Any]
    forced_hooks: HookGroup | None
    model_patches_to: Callable[[torch.device], None]
    model_size: Callable[[], int]
    lowvram_patch_counter: Callable[[], int]

    def _other_kind_of_plan(self) -> bool:
        """Whether the module was loaded by a patcher with another way of streaming."""
        plan = self.residence.plan
        return plan is not None and type(plan) is not StreamPlan

    def _take_shared_modules(self) -> None:
        """Have layers that other base modules hold too show none of those."""
        sharing.take(self.residence, (module for _, module in self.residence.modules()))

    def _forget_order(self) -> None:
        """Before other modules become resident or streamed."""
        if self.residence.plan is not None:
            self.residence.plan.forget_order()

    # -- the whole model -------------------------------------------------------------------

    def load(
        self,
        device_to: torch.device | None = None,
        lowvram_model_memory: int = 0,
        force_patch_weights: bool = False,
        full_load: bool = False,
    ) -> None:
        """Make the module show this view.

        Args:
            device_to: Device of resident weights; None leaves weights where they rest.
            lowvram_model_memory: Budget of resident bytes; 0 keeps what cannot stream, no more.
                Where nothing streams (on the CPU, without a device) there is no budget.
            force_patch_weights: Patch again even where the same patches are shown.
            full_load: Make everything resident whatever the budget.
        Raises:
            BaseException: Whatever went wrong, after every weight was put back.
        """
        device_to = None if device_to is None else accelerators.with_index(device_to)
        with self._restored_on_failure():
            self.clean_hooks()
            if self.residence.device != device_to or self._other_kind_of_plan():
                self.residence.restore()
            self._forget_order()
            self.residence.part_with_layers()
            self.residence.device = device_to
            used = 0
            whole = full_load or device_to is None or device_to.type == "cpu"
            entries = self._entries()
            sharing.take(self.residence, (entry.module for entry in entries))
            for entry in entries:
                throw_exception_if_processing_interrupted()
                fits = whole or used + entry.module_bytes <= lowvram_model_memory
                if fits or not is_castable(entry.module):
                    self._make_resident(entry, device_to, force_patch_weights)
                    used += entry.module_bytes
                else:
                    self._make_streamed(entry, force_patch_weights)
            self._patch_aliases(entries, device_to)
            self.residence.uuid = self.patches_uuid
            self._publish_state()
            for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
                callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)
            self._apply_forced_hooks()

    def _patch_aliases(self, entries: list[LoadEntry], device: torch.device | None) -> None:
        """Patch keys that name a module by a second path, which the walk does not visit."""
        if not self.patches:
            return
        visited = {f"{e.name}.{p}" if e.name else p for e in entries for p in e.params}
        for key in self.patches.keys() - visited:
            self.patch_weight_to_device(key, device_to=device)

    @contextmanager
    def _restored_on_failure(self) -> Iterator[None]:
        """Put every weight back when anything is raised inside.

        The memory of weights that are replaced inside is taken for those that replace them.
        """
        try:
            with self.residence.memory.reuse():
                yield
        except BaseException:
            self.residence.restore()
            self.residence.device = None
            self._publish_state()
            raise

    def _apply_forced_hooks(self) -> None:
        """Show the hooks this view always shows."""
        if self.forced_hooks is not None:
            self.apply_hooks(self.forced_hooks, force_apply=True)

    def patch_model(
        self,
        device_to: torch.device | None = None,
        lowvram_model_memory: int = 0,
        load_weights: bool = True,
        force_patch_weights: bool = False,
    ) -> nn.Module:
        """Apply object patches and, when asked, load the weights; returns the base module.

        Raises:
            BaseException: Whatever went wrong, after everything was put back.
        """
        wanted = load_weights and not force_patch_weights
        if wanted and lowvram_model_memory == 0 and self._is_shown(device_to):
            if self.current_hooks is None:
                self.unpatch_hooks()  # of another view
            self._apply_forced_hooks()
            return self.model
        self.eject_model()
        try:
            if load_weights and self._needs_own_undo(force_patch_weights):
                self.unpatch_model(self.offload_device, unpatch_weights=True)
            self._show_objects()
            if load_weights and lowvram_model_memory >= 0:
                self.load(
                    device_to,
                    lowvram_model_memory=lowvram_model_memory,
                    force_patch_weights=force_patch_weights,
                    full_load=lowvram_model_memory == 0,
                )
            self.inject_model()
        except BaseException:
            try:
                self.eject_model()
            finally:
                self.residence.put_objects_back()
            raise
        return self.model

    def _needs_own_undo(self, force_patch: bool) -> bool:
        """Whether other weights are shown and this patcher's class undoes patches its own way."""
        shown = self.residence.uuid
        own = type(self).unpatch_model is not WeightLoading.unpatch_model
        return own and shown is not None and (force_patch or shown != self.patches_uuid)

    def _is_shown(self, device: torch.device | None) -> bool:
        """Whether the module shows this view already, wholly resident on a device."""
        state = self.residence
        device = None if device is None else accelerators.with_index(device)
        return (
            state.uuid == self.patches_uuid
            and state.device == device
            and not state.streaming
            and all(self._is_held(key, device) for key in state.held)
            and not self.force_cast_weights
            and state.shows_objects(self.object_patches)
            and self._injections_in_effect()
        )

    def _show_objects(self) -> None:
        """Make the model hold this view's objects, and no other view's."""
        if self.residence.shows_objects(self.object_patches):
            return
        self.residence.put_objects_back()
        for name, value in self.object_patches.items():
            self.residence.swap_object(name, value)

    def unpatch_model(
        self, device_to: torch.device | None = None, unpatch_weights: bool = True
    ) -> None:
        """Take back what `patch_model` did.

        Args:
            device_to: Where plain weights go; None leaves them where they rest.
            unpatch_weights: Also put the weights back.
        """
        try:
            self.eject_model()
        finally:
            self.clean_hooks()
            if unpatch_weights:
                self.residence.restore()
                if device_to is not None:
                    self._rest_on(device_to)
                self.residence.device = None
            self.residence.put_objects_back()
            self._publish_state()

    def _rest_on(self, device: torch.device) -> None:
        """Move plain weights that rest elsewhere, for good."""
        device = accelerators.with_index(device)
        if all(t.device == device for t in self.model.state_dict(keep_vars=True).values()):
            return
        own = sharing.own_modules(self.residence)
        if len(own) == sum(1 for _ in self.residence.modules()):
            self.model.to(device)
            return
        for module in own:
            module._apply(lambda tensor: tensor.to(device), recurse=False)

    def partially_load(
        self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False
    ) -> int:
        """Show this view with up to `extra_memory` more bytes resident; with 0, as many as now.

        Returns:
            Bytes by which the resident weights grew; fewer than 0 where `extra_memory` is.
        """
        before = self.residence.loaded_on(device_to)
        budget = before + extra_memory
        everything = budget >= self.model_size()
        self.patch_model(
            device_to,
            lowvram_model_memory=0 if everything else max(budget, 1),
            force_patch_weights=force_patch_weights,
        )
        return self.residence.loaded_bytes - before

    def partially_unload(
        self,
        device_to: torch.device,  # noqa: ARG002 - weights go back to where they rest
        memory_to_free: int = 0,
        force_patch_weights: bool = False,
    ) -> int:
        """Stop keeping modules resident, from the back of the order of loading.

        Args:
            memory_to_free: Bytes wanted.
            force_patch_weights: Patch the resting weights instead of patching at use.
        Returns:
            Bytes freed; less than asked when only modules that cannot stream are left.
        """
        freed = 0
        self.clean_hooks()
        self._forget_order()
        self.residence.part_with_layers()
        for function in self.residence.functions():
            if isinstance(function, LowVramPatch):
                function.let_go()
        with self._restored_on_failure():
            for entry in reversed(self._entries()):
                if freed >= memory_to_free:
                    break
                held = self.residence.module_bytes(entry.name, entry.params)
                if held and is_castable(entry.module):
                    self._make_streamed(entry, force_patch_weights, pin=False)
                    freed += held
        self._publish_state()
        return freed

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        """Take the view off its module; returns the module.

        Args:
            unpatch_all: Also put weights and objects back.
        """
        try:
            self.eject_model()
            self.model_patches_to(self.offload_device)
        finally:
            if unpatch_all:
                self.unpatch_model(self.offload_device, unpatch_weights=unpatch_all)
        for callback in self.get_all_callbacks(CallbacksMP.ON_DETACH):
            callback(self, unpatch_all)
        return self.model

    def _publish_state(self) -> None:
        """Show the physical state under the attribute names custom nodes read on the module."""
        state = self.residence
        if state.model() is None:
            return
        shown = {
            "device": state.device or self.offload_device,
            "model_loaded_weight_memory": state.loaded_bytes,
            "model_lowvram": bool(state.streaming),
            "lowvram_patch_counter": self.lowvram_patch_counter(),
            "current_weight_patches_uuid": state.uuid,
        }
        for name, value in shown.items():
            if not isinstance(getattr(type(self.model), name, None), property):
                setattr(self.model, name, value)
                state.published[name] = value

    def _state_shown(self, name: str, value: Any) -> Any:
        """A fact of the physical state; what code outside wrote over it counts instead.

        Custom nodes that place weights on their own write these attributes of the module to tell
        the planner what they did.
        """
        shown = getattr(self.model, name, value)
        return value if shown == self.residence.published.get(name, shown) else shown
