"""One weight of a view: computed with its patches, put in its place, page-locked for streaming."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from comfy.devices import casting, pinning
from comfy.patching.attributes import copy_to_param, get_key_weight
from comfy.patching.lowvram import INTERMEDIATE_DTYPE, LowVramPatch
from comfy.patching.residence import Backup, Residence
from comfy.weights import arithmetic, row_blocks
from comfy.weights.mapped_file import is_file_backed, release_pages
from comfy.weights.rounding import stochastic_rounding, string_to_seed


class WeightPatching:
    """The part of a patcher that changes single weights."""

    model: nn.Module
    residence: Residence
    patches: dict[str, list[Any]]
    weight_inplace_update: bool
    load_device: torch.device

    @property
    def backup(self) -> dict[str, Any]:
        """Originals of patched weights, shared by all views of the module."""
        return self.residence.backup

    @backup.setter
    def backup(self, backup: dict[str, Any]) -> None:
        """Subclasses hand a clone the backup of its parent, which it shares anyway."""
        self.residence.backup = backup

    @property
    def pinned(self) -> set[str]:
        """Keys of weights that travel from page-locked memory."""
        return set(self.residence.pinned)

    # -- one weight ------------------------------------------------------------------------

    def calculate_weight(
        self,
        patches: list[Any],
        weight: torch.Tensor,
        key: str,
        intermediate_dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Patches applied to a weight the caller owns."""
        return arithmetic.calculate_weight(patches, weight, key, intermediate_dtype)

    def patch_weight_to_device(
        self,
        key: str,
        device_to: torch.device | None = None,
        inplace_update: bool = False,
        return_weight: bool = False,
    ) -> torch.Tensor | None:
        """Put a weight's patched form in its place, keeping the original.

        Args:
            key: State-dict key; a key without patches is left alone.
            device_to: Where the patched weight goes; None is where the original is.
            inplace_update: Write into the parameter, when it is already there.
            return_weight: Only compute and return the patched weight.
        Returns:
            The weight of a key without patches; the patched weight when it is asked for.
        """
        in_place = inplace_update or self.weight_inplace_update
        if not return_weight and self._shown_in_own_memory(key, device_to, in_place):
            return None
        current, set_func, convert_func = get_key_weight(self.model, key)
        if key not in self.patches:
            return current
        lent = self.residence.lending(key)
        weight = self.residence.home.get(key, current) if lent is None else lent.copy()
        if key in self.backup and lent is None:
            weight = self.backup[key].weight
        patched = self._patched(key, weight, device_to, convert_func)
        seed = string_to_seed(key)
        if set_func is None:
            patched = stochastic_rounding(patched, weight.dtype, seed=seed)
        else:
            patched = set_func(patched, inplace_update=False, seed=seed, return_weight=True)
        if return_weight:
            return patched
        owner, prefix, name = self._place(key)
        if in_place and current.device == patched.device and current.shape == patched.shape:
            if key not in self.backup and key not in self.residence.home:
                self.backup[key] = Backup(current.detach().clone(), True)
            copy_to_param(self.model, key, patched)
        else:
            self.residence.replace(owner, prefix, name, patched)
            self.backup.setdefault(key, Backup(self.residence.home[key], False))
            release_pages(weight)
        self.residence.applied[key] = tuple(self.patches[key])
        return None

    def _shown_in_own_memory(self, key: str, device: torch.device | None, in_place: bool) -> bool:
        """Show a weight's patched form in the memory of the original, if that can lend it.

        No frame on the way here may hold the weight: it lends only what nobody else sees. What is
        patched otherwise is put back here first, if it lent its memory before.
        """
        patches = self.patches.get(key)
        if not patches:
            return False
        module, prefix, name = self._place(key)
        plain = not (hasattr(module, f"set_{name}") or hasattr(module, f"convert_{name}"))
        here = device is None or device.type == "cpu"
        shown = False
        if here and plain and not in_place and self._adds_plainly():
            shown = self.residence.lend(module, prefix, name, patches)
        if shown:
            self.residence.applied[key] = tuple(patches)
        elif key in self.residence.lent:
            self.residence.put_back(module, prefix, name)
        return shown

    def _adds_plainly(self) -> bool:
        """Whether nobody replaced the weight arithmetic."""
        own = type(self).calculate_weight is WeightPatching.calculate_weight
        return own and not arithmetic.is_replaced()

    def _patched(
        self,
        key: str,
        weight: torch.Tensor,
        device: torch.device | None,
        convert: Callable[..., Any] | None,
    ) -> torch.Tensor:
        device = device or weight.device
        if convert is None and device == weight.device and self._adds_plainly():
            quick = row_blocks.patched(
                self.patches[key], weight.detach(), key, self.residence.memory
            )
            if quick is not None:
                return quick
        if convert is not None:
            working = convert(casting.cast_to_device(weight, device, None, copy=True), inplace=True)
            working = working.to(INTERMEDIATE_DTYPE)
        else:
            working = casting.cast_to_device(weight.detach(), device, INTERMEDIATE_DTYPE, copy=True)
        return self.calculate_weight(self.patches[key], working, key)

    def _place(self, key: str) -> tuple[nn.Module, str, str]:
        path, _, name = key.rpartition(".")
        return self.model.get_submodule(path), f"{path}." if path else "", name

    def _patch_at_use(self, key: str, keep: bool = True) -> LowVramPatch:
        """This view's patches of a weight as a function that its layer applies at use."""
        _, set_func, convert_func = get_key_weight(self.model, key)
        patches = {key: list(self.patches[key])}
        owner, _, name = self._place(key)
        apart = name == "weight" and bool(getattr(owner, "patches_apart", False))
        return LowVramPatch(
            key, patches, convert_func, set_func, keep, self._own_arithmetic(), stays_decoded=apart
        )

    def _own_arithmetic(self) -> Callable[..., torch.Tensor] | None:
        """`calculate_weight` where a subclass or a custom node replaced it; holds no patcher."""
        method = type(self).calculate_weight
        if method is WeightPatching.calculate_weight:
            return None
        return functools.partial(method, weakref.proxy(self))

    def pin_weight_to_device(self, key: str) -> None:
        """Let a weight that is streamed travel from page-locked memory, while there is any."""
        module, prefix, name = self._place(key)
        shown = getattr(module, name)
        if key in self.residence.pinned or shown.device.type != "cpu" or shown.is_pinned():
            return
        device = self.residence.device or self.load_device
        pinned = pinning.pin(shown, device, own_memory=is_file_backed(shown))
        if pinned is None:
            return
        if pinned.tensor.data_ptr() != shown.data_ptr():
            self.residence.replace(module, prefix, name, pinned.tensor)
            release_pages(shown)
        self.residence.pinned[key] = pinned

    def unpin_weight(self, key: str) -> None:
        """End the page lock of a streamed weight; its own memory takes the place of a copy."""
        if key in self.residence.pinned:
            self.residence.close_plan()
            module, prefix, name = self._place(key)
            if key in self.residence.applied:
                del self.residence.pinned[key]
            else:
                self.residence.put_back(module, prefix, name)

    def unpin_all_weights(self) -> None:
        """`unpin_weight` for every weight."""
        for key in list(self.residence.pinned):
            self.unpin_weight(key)
