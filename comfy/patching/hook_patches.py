"""Weights of hooks: shown on top of a loaded view, entry by entry and step by step.

A hooked weight is computed from the weight the view shows (its own patches included) and takes its
place; taking hooks off puts that parameter back. A streamed module gets one more weight function
instead. Computed weights are kept for the next switch while memory allows (mode MaxSpeed).
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from comfy.devices import casting, memory
from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.patching.attributes import get_key_weight
from comfy.patching.hook_group import HookGroup, create_transformer_options_from_hooks
from comfy.patching.hooks import EnumHookMode, EnumHookType
from comfy.patching.lowvram import INTERMEDIATE_DTYPE, LowVramPatch
from comfy.patching.recorded_patches import StateDictKeys, record
from comfy.patching.residence import Residence
from comfy.patching.wrappers import CallbacksMP
from comfy.weights import arithmetic, row_blocks
from comfy.weights.rounding import stochastic_rounding, string_to_seed

logger = logging.getLogger(__name__)

HookPatches = dict[Any, dict[str, list[Any]]]
"""hook_ref -> key -> patches."""

SPARE_FACTOR = 2
"""Computed hook weights are kept while this many times the inference memory stays free."""


class HookPatching:
    """The part of a patcher that registers hooks and shows their weights."""

    model: nn.Module
    load_device: torch.device
    residence: Residence
    patches_uuid: Any
    is_clip: bool
    hook_patches: HookPatches
    hook_patches_backup: HookPatches | None
    cached_hook_patches: dict[HookGroup, dict[str, torch.Tensor]]
    _cached_strengths: dict[HookGroup, list[float]]
    current_hooks: HookGroup | None
    forced_hooks: HookGroup | None
    hook_mode: EnumHookMode
    get_all_callbacks: Callable[[str], list[Callable[..., Any]]]
    get_key_patches: Callable[..., dict[str, list[Any]]]
    _without_injections: Callable[[], AbstractContextManager[None]]
    _place: Callable[[str], tuple[nn.Module, str, str]]

    def _init_hooks(self) -> None:
        self.hook_patches = {}
        self.hook_patches_backup = None
        self.cached_hook_patches = {}
        self._cached_strengths = {}
        self.current_hooks = None
        self.forced_hooks = None
        self.hook_mode = EnumHookMode.MaxSpeed

    def _copy_hooks_to(self, n: HookPatching) -> None:
        """Give a clone its own tables; nothing computed is shared."""
        n.hook_patches = clone_hook_patches(self.hook_patches)
        n.hook_patches_backup = (
            None
            if self.hook_patches_backup is None
            else clone_hook_patches(self.hook_patches_backup)
        )
        n.forced_hooks = None if self.forced_hooks is None else self.forced_hooks.clone()
        n.hook_mode = self.hook_mode

    @property
    def hook_backup(self) -> dict[str, tuple[torch.Tensor, torch.device]]:
        """Weights that hooks replaced, with their device, by key; a copy."""
        return {key: (t, t.device) for key, t in self.residence.hooked.items()}

    # -- registration ----------------------------------------------------------------------

    def set_hook_mode(self, hook_mode: EnumHookMode) -> None:
        """Choose between speed and memory."""
        self.hook_mode = hook_mode

    def register_all_hook_patches(
        self,
        hooks: HookGroup,
        target_dict: dict[str, Any],
        model_options: dict[str, Any] | None = None,
        registered: HookGroup | None = None,
    ) -> HookGroup:
        """Let hooks register for a run; `restore_hook_patches` forgets them again.

        Returns:
            The hooks that take part.
        """
        self.restore_hook_patches()
        registered = HookGroup() if registered is None else registered
        waiting = []
        for hook in hooks.get_type(EnumHookType.Weight):
            if hook.hook_ref in self.hook_patches:
                registered.add(hook)
            else:
                waiting.append(hook)
        if waiting:
            self.hook_patches_backup = clone_hook_patches(self.hook_patches)
            for hook in waiting:
                hook.add_hook_patches(self, model_options, target_dict, registered)
        for callback in self.get_all_callbacks(CallbacksMP.ON_REGISTER_ALL_HOOK_PATCHES):
            callback(self, hooks, target_dict, model_options, registered)
        return registered

    def restore_hook_patches(self) -> None:
        """Forget the hooks registered for the last run."""
        if self.hook_patches_backup is not None:
            self.hook_patches = self.hook_patches_backup
            self.hook_patches_backup = None

    def add_hook_patches(
        self,
        hook: Any,
        patches: Mapping[Any, Any],
        strength_patch: float = 1.0,
        strength_model: float = 1.0,
    ) -> list[Any]:
        """Record a hook's weight patches; arguments and result as in `add_patches`."""
        table = self.hook_patches.setdefault(hook.hook_ref, {})
        with self._without_injections():
            known = StateDictKeys(self.model)
            taken = record(table, patches, (strength_patch, strength_model), known)
        self.patches_uuid = uuid.uuid4()
        return taken

    def get_combined_hook_patches(self, hooks: HookGroup | None) -> dict[str, list[Any]]:
        """The weight patches of a group at the present strengths."""
        combined: dict[str, list[Any]] = {}
        for hook in hooks.hooks if hooks is not None else ():
            for key, patches in self.hook_patches.get(hook.hook_ref, {}).items():
                if math.isclose(hook.strength, 1.0):
                    scaled = list(patches)
                else:
                    scaled = [(patch[0] * hook.strength, *patch[1:]) for patch in patches]
                combined.setdefault(key, []).extend(scaled)
        return combined

    # -- a run -----------------------------------------------------------------------------

    def prepare_hook_patches_current_keyframe(
        self, t: torch.Tensor, hook_group: HookGroup, model_options: dict[str, Any]
    ) -> None:
        """Move schedules to a step; weights computed for other strengths are forgotten.

        Args:
            t: Sigmas of the batch [B]; the first counts.
            hook_group: Hooks of an entry.
            model_options: Options of the run.
        """
        options = model_options.get("transformer_options", {})
        for hook in hook_group.hooks:
            if not hook.hook_keyframe.prepare_current_keyframe(t[0], options):
                continue
            for cached in list(self.cached_hook_patches):
                if cached.contains(hook):
                    del self.cached_hook_patches[cached]
            if self.current_hooks is not None and self.current_hooks.contains(hook):
                self.patch_hooks(None)

    def apply_hooks(
        self,
        hooks: HookGroup | None,
        transformer_options: dict[str, Any] | None = None,
        force_apply: bool = False,
    ) -> dict[str, Any]:
        """Show the weights of an entry's hooks, and no others.

        Returns:
            The options its hooks add.
        """
        keep = self.current_hooks is hooks and not (force_apply and hooks is not None)
        if not keep:
            self.patch_hooks(hooks)
            for callback in self.get_all_callbacks(CallbacksMP.ON_APPLY_HOOKS):
                callback(self, hooks)
        return create_transformer_options_from_hooks(self, hooks, transformer_options)

    def patch_hooks(self, hooks: HookGroup | None) -> None:
        """Show the weights of a group; None shows the view alone.

        Weight by weight, so that each finds the memory of the one whose place it takes.
        """
        patches = self.get_combined_hook_patches(hooks)
        if not patches:
            self.unpatch_hooks()
            self.current_hooks = hooks
            return
        assert hooks is not None
        strengths = [hook.strength for hook in hooks.hooks]
        if self._cached_strengths.get(hooks) != strengths:
            self.cached_hook_patches.pop(hooks, None)
            self._cached_strengths[hooks] = strengths
        cached = self.cached_hook_patches.get(hooks, {})
        needs_originals = any(
            arithmetic.is_model_difference(p) for ps in patches.values() for p in ps
        )
        originals = self.get_key_patches() if needs_originals else None
        self.residence.show_hooks_of_none()
        try:
            with self.residence.memory.reuse():
                self.unpatch_hooks(self.residence.hooked_keys() - patches.keys())
                for key in patches:
                    throw_exception_if_processing_interrupted()
                    self.residence.take_hook_off(key)
                    self._show_hooked(hooks, key, patches, cached.get(key), originals)
        except BaseException:
            self.unpatch_hooks()
            raise
        self.current_hooks = hooks

    def patch_hook_weight_to_device(
        self,
        hooks: HookGroup,
        combined_patches: dict[str, list[Any]],
        key: str,
        original_weights: Mapping[str, Any] | None = None,
        memory_counter: Any | None = None,  # noqa: ARG002 - public signature
    ) -> None:
        """Show one weight with the patches of a group."""
        self._show_hooked(hooks, key, combined_patches, None, original_weights)

    def _show_hooked(
        self,
        hooks: HookGroup,
        key: str,
        patches: Mapping[str, list[Any]],
        ready: torch.Tensor | None,
        originals: Mapping[str, Any] | None,
    ) -> None:
        module, prefix, name = self._place(key)
        if prefix.removesuffix(".") in self.residence.streaming and name in ("weight", "bias"):
            _, set_func, convert_func = get_key_weight(self.model, key)
            unpatched = None if originals is None else {key: originals[key]}
            function = LowVramPatch(
                key, {key: patches[key]}, convert_func, set_func, originals=unpatched
            )
            self.residence.add_hook_function(module, prefix, name, function)
            return
        shown, set_func, convert_func = get_key_weight(self.model, key)
        if ready is None or ready.device != shown.device:
            if set_func is None and convert_func is None and not arithmetic.is_replaced():
                at_hand = self.residence.memory
                ready = row_blocks.patched(patches[key], shown.detach(), key, at_hand)
            else:
                ready = None
            if ready is None:  # not plain LoRAs alone, or not on the CPU
                ready = _hooked_weight(key, shown, patches[key], set_func, convert_func, originals)
            if self._may_keep(ready):
                self.cached_hook_patches.setdefault(hooks, {})[key] = ready
        self.residence.show_hooked(module, prefix, name, ready)

    def _may_keep(self, weight: torch.Tensor) -> bool:
        if self.hook_mode != EnumHookMode.MaxSpeed:
            return False
        spare = SPARE_FACTOR * memory.minimum_inference_memory()
        return memory.get_free_memory(weight.device) - spare > memory.tensor_bytes(weight)

    def unpatch_hooks(self, whitelist_keys_set: Container[str] | None = None) -> None:
        """Show the view without any hook's weights.

        Args:
            whitelist_keys_set: Only these weights; None means all.
        """
        self.residence.take_hooks_off(whitelist_keys_set)

    def cached_hook_weights(self) -> list[torch.Tensor]:
        """Weights computed for hooks that are kept for the next switch."""
        return [t for kept in list(self.cached_hook_patches.values()) for t in list(kept.values())]

    def clear_cached_hook_weights(self) -> None:
        """Forget computed weights of hooks."""
        self.cached_hook_patches.clear()
        self._cached_strengths.clear()

    def clean_hooks(self) -> None:
        """Take hooks off and forget what was computed for them, by any view of the module."""
        self.unpatch_hooks()
        self.clear_cached_hook_weights()
        self.residence.forget_hook_weights()


def clone_hook_patches(patches: HookPatches) -> HookPatches:
    """A copy whose lists can be extended without touching the original."""
    return {
        ref: {key: list(items) for key, items in table.items()} for ref, table in patches.items()
    }


def _hooked_weight(
    key: str,
    shown: torch.Tensor,
    patches: list[Any],
    set_func: Callable[..., Any] | None,
    convert_func: Callable[..., Any] | None,
    originals: Mapping[str, Any] | None,
) -> torch.Tensor:
    working = shown.detach()
    if convert_func is not None:
        working = convert_func(working.clone(), inplace=True)
    working = casting.cast_to(working, INTERMEDIATE_DTYPE, copy=True)
    patched = arithmetic.calculate_weight(patches, working, key, original_weights=originals)
    seed = string_to_seed(key)
    if set_func is not None:
        return set_func(patched, inplace_update=False, seed=seed, return_weight=True)
    return stochastic_rounding(patched, shown.dtype, seed=seed)
