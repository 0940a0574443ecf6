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
from typing import Any, NamedTuple

import torch
from torch import nn

from comfy.devices import casting, memory
from comfy.ops.cast import is_castable
from comfy.ops.streaming import StreamPlan
from comfy.patching.attributes import get_key_weight
from comfy.patching.hook_patches import HookPatching
from comfy.patching.injections import Injections
from comfy.patching.lowvram import LowVramPatch
from comfy.patching.residence import own_tensors
from comfy.patching.weights import WeightPatching
from comfy.patching.wrappers import CallbacksMP

logger = logging.getLogger(__name__)


class LoadEntry(NamedTuple):
    """One module in the order of loading.

    Attributes:
        offload_bytes: Bytes its streaming takes on the device at use (0 when it cannot stream).
        module_bytes: Bytes of its weights.
        name: Dotted name.
        module: The module.
        params: Names of its own parameters and buffers.
    """

    offload_bytes: int
    module_bytes: int
    name: str
    module: nn.Module
    params: list[str]


class WeightLoading(WeightPatching, Injections, HookPatching):
    """The physical half of a patcher; `ModelPatcher` adds the logical half."""

    load_device: torch.device
    offload_device: torch.device
    patches_uuid: Any
    object_patches: dict[str, Any]
    weight_wrapper_patches: dict[str, list[Callable[..., Any]]]
    force_cast_weights: bool
    model_patches_to: Callable[[torch.device], None]
    model_size: Callable[[], int]

    # -- one module ------------------------------------------------------------------------

    def _load_list(self) -> list[LoadEntry]:
        """Modules that hold weights, in order of loading: what cannot stream, then by size."""
        entries = []
        for name, module in self.residence.modules():
            params = own_tensors(module)
            prefix = f"{name}." if name else ""
            originals = [self.residence.original(module, prefix, p) for p in params]
            size = sum(memory.tensor_bytes(t) for t in originals if t is not None)
            entries.append(
                LoadEntry(size if is_castable(module) else 0, size, name, module, params)
            )
        entries.sort(key=lambda e: (is_castable(e.module), -e.module_bytes))
        return entries

    def _make_resident(
        self, entry: LoadEntry, device: torch.device | None, force_patch: bool
    ) -> None:
        """Put a module's weights, patched, on the device."""
        self.residence.stop_streaming(entry.name, entry.module)
        prefix = f"{entry.name}." if entry.name else ""
        held = entry.name in self.residence.resident
        for name in entry.params:
            key = prefix + name
            wanted = tuple(self.patches.get(key, ()))
            shown = self.residence.applied.get(key, ())
            if force_patch or not held or not same_patches(wanted, shown):
                self.residence.held[key] = self._show(entry.module, prefix, name, device)
        self.residence.resident[entry.name] = sum(
            self.residence.held.get(prefix + name, 0) for name in entry.params
        )
        self._attach_functions(entry, streamed=False)

    def _show(self, module: nn.Module, prefix: str, name: str, device: torch.device | None) -> int:
        """One weight of a resident module; returns the bytes it takes on the device."""
        key = prefix + name
        original = self.residence.original(module, prefix, name)
        assert original is not None
        if key in self.patches:
            self.patch_weight_to_device(key, device_to=device)
            return memory.tensor_bytes(get_key_weight(self.model, key)[0])
        if device is None:
            self.residence.put_back(module, prefix, name)
            return memory.tensor_bytes(original)
        return self.residence.move(module, prefix, name, device)

    def _make_streamed(self, entry: LoadEntry) -> None:
        """Leave a module's weights where they rest; they travel and are patched at use."""
        self.residence.release(entry.name, entry.module)
        self._attach_functions(entry, streamed=True)
        device = self.residence.device
        if device is None:
            return
        plan = self.residence.open_plan(device)
        self.residence.stream(entry.name, entry.module, {"stream_plan": plan})
        if plan.streams and casting.pin_memory_supported(device):
            prefix = f"{entry.name}." if entry.name else ""
            for name in entry.params:
                self.pin_weight_to_device(prefix + name)

    def streaming_reserve(self) -> int:
        """Device bytes that streaming takes at most: the largest layers that are there at once."""
        sizes = [e.module_bytes for e in self._load_list() if is_castable(e.module)]
        return 2 * max(sizes, default=0)

    def _attach_functions(self, entry: LoadEntry, streamed: bool, patched: bool = True) -> None:
        """Set what a layer does to its weights at use.

        Args:
            entry: The layer.
            streamed: Its weights travel, so patches are applied at use.
            patched: Unless the weights arrive with their patches applied.
        """
        prefix = f"{entry.name}." if entry.name else ""
        settings: dict[str, Any] = {}
        for name in ("weight", "bias"):
            key = prefix + name
            functions: list[Any] = []
            if streamed and patched and key in self.patches:
                _, set_func, convert_func = get_key_weight(self.model, key)
                functions.append(
                    LowVramPatch(key, {key: list(self.patches[key])}, convert_func, set_func)
                )
            functions += self.weight_wrapper_patches.get(key, ())
            if functions:
                settings[f"{name}_function"] = functions
        if (streamed or settings or self.force_cast_weights) and is_castable(entry.module):
            settings["comfy_cast_weights"] = True
        if settings:
            self.residence.stream(entry.name, entry.module, settings)

    def _other_kind_of_plan(self) -> bool:
        """Whether the module was loaded by a patcher with another way of streaming."""
        plan = self.residence.plan
        return plan is not None and type(plan) is not StreamPlan

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
            lowvram_model_memory: Budget of resident bytes; 0 means all.
            force_patch_weights: Patch again even where the same patches are shown.
            full_load: Make everything resident whatever the budget.
        Raises:
            BaseException: Whatever went wrong, after every weight was put back.
        """
        with self._restored_on_failure():
            self.clean_hooks()
            if self.residence.device != device_to or self._other_kind_of_plan():
                self.residence.restore()
            self._forget_order()
            self.residence.device = device_to
            used = 0
            budget = 0 if full_load else lowvram_model_memory
            entries = self._load_list()
            for entry in entries:
                fits = budget <= 0 or used + entry.module_bytes <= budget
                if fits or not is_castable(entry.module):
                    self._make_resident(entry, device_to, force_patch_weights)
                    used += entry.module_bytes
                else:
                    self._make_streamed(entry)
            self._patch_aliases(entries, device_to)
            self.residence.uuid = self.patches_uuid
            self._publish_state()
            for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
                callback(self, device_to, lowvram_model_memory, force_patch_weights, full_load)

    def _patch_aliases(self, entries: list[LoadEntry], device: torch.device | None) -> None:
        """Patch keys that name a module by a second path, which the walk does not visit."""
        if not self.patches:
            return
        visited = {f"{e.name}.{p}" if e.name else p for e in entries for p in e.params}
        for key in self.patches.keys() - visited:
            self.patch_weight_to_device(key, device_to=device)

    @contextmanager
    def _restored_on_failure(self) -> Iterator[None]:
        """Put every weight back when anything is raised inside."""
        try:
            yield
        except BaseException:
            self.residence.restore()
            self.residence.device = None
            self._publish_state()
            raise

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
            return self.model
        self.eject_model()
        try:
            self._show_objects()
            if load_weights and lowvram_model_memory >= 0:
                self.load(device_to, lowvram_model_memory, force_patch_weights,
                          full_load=lowvram_model_memory == 0)  # fmt: skip
            self.inject_model()
        except BaseException:
            self.eject_model()
            self.residence.put_objects_back()
            raise
        return self.model

    def _is_shown(self, device: torch.device | None) -> bool:
        """Whether the module shows this view already, wholly resident on a device."""
        state = self.residence
        return (
            state.uuid == self.patches_uuid
            and state.device == device
            and not state.streaming
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
        self.eject_model()
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
        if any(t.device != device for t in self.model.state_dict(keep_vars=True).values()):
            self.model.to(device)

    def partially_load(
        self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False
    ) -> int:
        """Show this view with up to `extra_memory` more bytes resident.

        Returns:
            Bytes by which the resident weights grew.
        """
        before = self.residence.loaded_bytes
        budget = before + extra_memory
        if budget >= self.model_size():
            budget = 0
        self.patch_model(device_to, budget if budget == 0 else max(budget, 1), True,
                         force_patch_weights)  # fmt: skip
        return self.residence.loaded_bytes - before

    def partially_unload(
        self,
        device_to: torch.device,  # noqa: ARG002 - weights go back to where they rest
        memory_to_free: int = 0,
        force_patch_weights: bool = False,  # noqa: ARG002 - public signature
    ) -> int:
        """Stop keeping modules resident, from the back of the order of loading.

        Returns:
            Bytes freed; less than asked when only modules that cannot stream are left.
        """
        freed = 0
        self.clean_hooks()
        self._forget_order()
        with self._restored_on_failure():
            for entry in reversed(self._load_list()):
                if freed >= memory_to_free:
                    break
                held = self.residence.resident.get(entry.name, 0)
                if held and is_castable(entry.module):
                    self._make_streamed(entry)
                    freed += held
        self._publish_state()
        return freed

    def detach(self, unpatch_all: bool = True) -> nn.Module:
        """Take the view off its module; returns the module.

        Args:
            unpatch_all: Also put weights and objects back.
        """
        self.eject_model()
        self.model_patches_to(self.offload_device)
        if unpatch_all:
            self.unpatch_model(self.offload_device, unpatch_weights=unpatch_all)
        for callback in self.get_all_callbacks(CallbacksMP.ON_DETACH):
            callback(self, unpatch_all)
        return self.model

    def _publish_state(self) -> None:
        """Show the physical state under the attribute names custom nodes read on the module."""
        state = self.residence
        shown = {
            "device": state.device or self.offload_device,
            "model_loaded_weight_memory": state.loaded_bytes,
            "model_lowvram": bool(state.streaming),
            "current_weight_patches_uuid": state.uuid,
        }
        for name, value in shown.items():
            if not isinstance(getattr(type(self.model), name, None), property):
                setattr(self.model, name, value)


def same_patches(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two lists of patches are the same objects in the same order."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))
