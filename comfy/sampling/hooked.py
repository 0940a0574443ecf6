"""Hooks of conditioning entries around a run: collected, registered with the model, released.

An entry may carry a group of hooks (weights, options, models) that apply while it is evaluated.
Control nets may carry hooks too; these count for the entries that use the control net.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import (
    EnumHookMode,
    EnumHookType,
    EnumWeightTarget,
    create_target_dict,
)

CondLists = dict[str, list[dict[str, Any]]]


def _entries(conds: CondLists) -> Iterator[dict[str, Any]]:
    for entries in conds.values():
        yield from entries


def _control_groups(entry: dict[str, Any]) -> list[HookGroup]:
    """Groups of an entry's control nets, which form a chain."""
    control = entry.get("control")
    if control is None or not hasattr(control, "get_extra_hooks"):
        return []
    return [group for group in control.get_extra_hooks() if group is not None]


def share_control_hooks(conds: CondLists) -> None:
    """Give entries the hooks of their control nets, in place.

    Entries with the same control net and group share one combined group: switching weights costs
    time, and groups are compared by identity.
    """
    combined: dict[tuple[int, int], HookGroup | None] = {}
    for entry in _entries(conds):
        extra = _control_groups(entry)
        if extra:
            own = entry.get("hooks")
            key = (id(entry["control"]), id(own))
            if key not in combined:
                combined[key] = HookGroup.combine_all_hooks([*extra, own])
            entry["hooks"] = combined[key]


def get_hooks_from_cond(cond: Iterable[dict[str, Any]], full_hooks: HookGroup) -> HookGroup:
    """Add to a group all hooks that a list's entries or their control nets carry, each once."""
    for entry in cond:
        for group in [entry.get("hooks"), *_control_groups(entry)]:
            for hook in group.hooks if group is not None else ():
                full_hooks.add(hook)
    return full_hooks


def collect_hooks(conds: CondLists) -> HookGroup:
    """All hooks of all lists, each once."""
    return get_hooks_from_cond(_entries(conds), HookGroup())


def hook_models(conds: CondLists) -> list[Any]:
    """Models that hooks want loaded with the run's."""
    hooks = collect_hooks(conds).get_type(EnumHookType.AdditionalModels)
    return [model for hook in hooks for model in hook.models or ()]


def register_hooks(patcher: Any, conds: CondLists, model_options: dict[str, Any]) -> None:
    """Let the hooks of a run register with the patcher; those that did are noted in the options."""
    hooks = collect_hooks(conds)
    if not len(hooks):
        return
    registered, target = HookGroup(), create_target_dict(EnumWeightTarget.Model)
    for kind in (EnumHookType.TransformerOptions, EnumHookType.AdditionalModels):
        for hook in hooks.get_type(kind):
            hook.add_hook_patches(patcher, model_options, target, registered)
    patcher.register_all_hook_patches(hooks, target, model_options, registered)
    if len(registered):
        model_options["registered_hooks"] = registered


def drop_unregistered(conds: CondLists, model_options: dict[str, Any]) -> None:
    """Take hooks that did not register off the entries, in place."""
    registered = model_options.get("registered_hooks", HookGroup())
    kept: dict[int, HookGroup] = {}
    for entry in _entries(conds):
        group = entry.get("hooks")
        if group is None or group.is_subset_of(registered):
            continue
        if id(group) not in kept:
            kept[id(group)] = group.new_with_common_hooks(registered)
        if len(kept[id(group)]):
            entry["hooks"] = kept[id(group)]
        else:
            del entry["hooks"]


def mode_for(conds: CondLists, mode: EnumHookMode) -> EnumHookMode:
    """With at most one group nothing is switched back to, so nothing needs to be kept."""
    groups = {id(entry.get("hooks")) for entry in _entries(conds)}
    return EnumHookMode.MinVram if len(groups) <= 1 else mode
