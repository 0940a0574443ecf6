"""One module of a model: made resident on a device, or left where it rests and streamed at use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from comfy.devices import accelerators, casting, memory
from comfy.ops.cast import is_castable
from comfy.patching.attributes import get_key_weight, own_tensors
from comfy.patching.equality import same_objects
from comfy.patching.lowvram import decoding_bytes, low_vram_patch_estimate_vram, patch_bytes
from comfy.patching.occupancy import HeldWeight
from comfy.patching.weights import WeightPatching

PLAINLY_ROUNDED = (torch.float32, torch.float16, torch.bfloat16)
"""Types that patched weights are rounded to without random numbers, which a device has of its own.
"""

AT_USE = ("weight", "bias")
"""Tensors of a layer that travel, and are patched, at use."""


def patched_apart(module: nn.Module, name: str) -> bool:
    """Whether patches of a tensor are added at every use, for its code is too coarse for them."""
    return name == "weight" and bool(getattr(module, "patches_apart", False))


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


class ModuleLoading(WeightPatching):
    """The part of a patcher that shows its view on single modules."""

    offload_device: torch.device
    weight_wrapper_patches: dict[str, list[Callable[..., Any]]]
    force_cast_weights: bool

    def _load_list(
        self,
        prio_comfy_cast_weights: bool = False,  # noqa: ARG002 - public signature
        default_device: torch.device | None = None,  # noqa: ARG002 - public signature
    ) -> list[LoadEntry]:
        """Modules that hold weights, in order of loading: what cannot stream, then by size, then
        what few runs use (``seldom_used``)."""
        entries = []
        for name, module in self.residence.modules():
            params = own_tensors(module)
            prefix = f"{name}." if name else ""
            originals = [self.residence.original(module, prefix, p) for p in params]
            size = sum(memory.tensor_bytes(t) for t in originals if t is not None)
            entries.append(
                LoadEntry(size if is_castable(module) else 0, size, name, module, params)
            )
        entries.sort(
            key=lambda e: (
                is_castable(e.module),
                bool(getattr(e.module, "seldom_used", False)),
                -e.module_bytes,
            )
        )
        return entries

    def _entries(self) -> list[LoadEntry]:
        """`_load_list`, which custom nodes replace by functions that give plain tuples."""
        return [LoadEntry(*entry) for entry in self._load_list()]

    def _make_resident(
        self, entry: LoadEntry, device: torch.device | None, force_patch: bool
    ) -> None:
        """Put a module's weights, patched, on the device."""
        self.residence.stop_streaming(entry.name, entry.module)
        prefix = f"{entry.name}." if entry.name else ""
        for name in entry.params:
            key = prefix + name
            apart = patched_apart(entry.module, name) and not force_patch
            wanted = () if apart else tuple(self.patches.get(key, ()))
            shown = self.residence.applied.get(key, ())
            again = force_patch and wanted
            if again or not self._is_held(key, device) or not same_objects(wanted, shown):
                size = self._show(entry.module, prefix, name, device, bool(wanted))
                shown_tensor = get_key_weight(self.model, key)[0]
                self.residence.held[key] = HeldWeight(shown_tensor, size)
        self.residence.resident.add(entry.name)
        self._attach_functions(entry, streamed=False)

    def _is_held(self, key: str, device: torch.device | None) -> bool:
        """Whether a weight is resident, where it was put."""
        held = self.residence.held.get(key)
        return held is not None and (device is None or held.tensor.device == device)

    def _show(
        self,
        module: nn.Module,
        prefix: str,
        name: str,
        device: torch.device | None,
        patched: bool,
    ) -> int:
        """One weight of a resident module, patched or plain; returns its bytes on the device."""
        key = prefix + name
        if patched:
            self._patch_weight(module, prefix, name, device)
            self.residence.applied[key] = tuple(self.patches[key])
            size = memory.tensor_bytes(get_key_weight(self.model, key)[0])
            self.residence.moved_bytes += size
            return size
        if device is None:
            original = self.residence.original(module, prefix, name)
            assert original is not None
            self.residence.put_back(module, prefix, name)
            return memory.tensor_bytes(original)
        return self.residence.move(module, prefix, name, device)

    def _patch_weight(
        self, module: nn.Module, prefix: str, name: str, device: torch.device | None
    ) -> None:
        """Call `patch_weight_to_device`, which subclasses replace, on the original weight."""
        method = getattr(self.patch_weight_to_device, "__func__", None)
        if method is WeightPatching.patch_weight_to_device:
            if self.residence.lending(prefix + name) is None:
                self.residence.put_back(module, prefix, name)
            self.patch_weight_to_device(prefix + name, device_to=device)
            return
        self.residence.put_back(module, prefix, name)
        original = self.residence.original(module, prefix, name)
        self.patch_weight_to_device(prefix + name, device_to=device)
        self.residence.keep_original(module, prefix, name, original)

    def _make_streamed(self, entry: LoadEntry, force_patch: bool = False, pin: bool = True) -> None:
        """Leave a module's weights where they rest; they travel and are patched at use.

        Args:
            entry: The module.
            force_patch: Patch the resting weights now, for layers that do not patch at use.
            pin: Page-lock them, for a run that is about to start.
        """
        self.residence.release(entry.name, entry.module)
        self._leave_device(entry)
        self._patch_at_rest(entry, force_patch)
        self._attach_functions(entry, streamed=True)
        device = self.residence.device
        if device is None:
            return
        plan = self.residence.open_plan(device)
        self.residence.stream(entry.name, entry.module, {"stream_plan": plan})
        if pin and plan.streams and casting.pin_memory_supported(device):
            prefix = f"{entry.name}." if entry.name else ""
            for name in entry.params:
                self.pin_weight_to_device(prefix + name)

    def _patch_at_rest(self, entry: LoadEntry, everything: bool) -> None:
        """Patch a streamed module's weights where they rest.

        Args:
            entry: The module.
            everything: Also weight and bias, which layers usually patch at use, because patches
                are small; those of them that are not travel once, in the weight.
        """
        prefix = f"{entry.name}." if entry.name else ""
        for name in entry.params:
            key = prefix + name
            if key in self.patches and (
                everything or name not in AT_USE or self._travels_patched(key)
            ):
                self._patch_weight(entry.module, prefix, name, None)
                self.residence.applied[key] = tuple(self.patches[key])

    def _outweighs(self, key: str) -> bool:
        """Whether the patches of a weight are as large as the weight, as another model's are."""
        original = self.residence.original(*self._place(key))
        size = 0 if original is None else memory.tensor_bytes(original)
        return sum(patch_bytes(patch) for patch in self.patches[key]) >= size

    def _travels_patched(self, key: str) -> bool:
        """Whether a streamed weight is patched where it rests, because its patches are large.

        Only where it is rounded there as on the device.
        """
        weight, set_func, convert_func = get_key_weight(self.model, key)
        plain = set_func is None and convert_func is None
        return plain and weight.dtype in PLAINLY_ROUNDED and self._outweighs(key)

    def _leave_device(self, entry: LoadEntry) -> None:
        """Move weights that themselves are on the load device to where the model rests, for good.

        A module that was built there, or that a custom node moved, would hold its memory for ever.
        """
        device, rest = self.residence.device, accelerators.with_index(self.offload_device)
        own = [*entry.module._parameters.values(), *entry.module._buffers.values()]
        if device != rest and any(t is not None and t.device == device for t in own):
            entry.module._apply(lambda tensor: tensor.to(rest), recurse=False)

    def streaming_reserve(self) -> int:
        """Device bytes that streaming keeps: the largest layers there at once, and the patches."""
        sizes = [e.module_bytes for e in self._entries() if is_castable(e.module)]
        kept = [key for key in self.patches if not self._outweighs(key)]
        patches = (patch_bytes(patch) for key in kept for patch in self.patches[key])
        return 2 * max(sizes, default=0) + sum(patches)

    def patching_memory(self) -> int:
        """Device bytes of the copies made while the largest weight is decoded or patched at use."""
        at_use = [key for key in self.patches if not self._travels_patched(key)]
        sizes = [low_vram_patch_estimate_vram(self.model, key) for key in at_use]
        modules = (module for _, module in self.residence.modules())
        return max([*sizes, *(decoding_bytes(module) for module in modules)], default=0)

    def _attach_functions(self, entry: LoadEntry, streamed: bool, patched: bool = True) -> None:
        """Set what a layer does to its weights at use.

        Args:
            entry: The layer.
            streamed: Its weights travel, so patches are applied at use, but to those patched at
                rest.
            patched: Unless all weights arrive with their patches applied.
        """
        prefix = f"{entry.name}." if entry.name else ""
        settings: dict[str, Any] = {}
        for name in AT_USE:
            key = prefix + name
            functions: list[Any] = []
            at_rest = key in self.residence.applied
            at_use = (streamed and patched) or patched_apart(entry.module, name)
            if at_use and key in self.patches and not at_rest:
                functions.append(self._patch_at_use(key, keep=not self._outweighs(key)))
            functions += self.weight_wrapper_patches.get(key, ())
            if functions:
                settings[f"{name}_function"] = functions
        if (streamed or settings or self.force_cast_weights) and is_castable(entry.module):
            settings["comfy_cast_weights"] = True
        if settings:
            self.residence.stream(entry.name, entry.module, settings)
