"""Conditioning lists with hooks, masks and ranges set on every entry; the lists given are kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from comfy.patching.hook_group import HookGroup

Conditioning = list[Any]
"""[[tensor, options], ...]."""

Range = tuple[float, float]


Combined = dict[tuple[HookGroup, HookGroup], HookGroup | None]
"""Groups already combined, by those they were made of. Entries share a model call, and the weights
shown for it, only if they have the very same group."""


def conditioning_set_values(
    conditioning: Conditioning,
    values: dict[str, Any],
    append_hooks: bool = True,
    cache: Combined | None = None,
) -> Conditioning:
    """Set options on every entry; hook groups are combined with those an entry has.

    Args:
        append_hooks: Keep the hooks an entry has; False replaces them.
        cache: Groups that several lists share.
    """
    cache = {} if cache is None else cache
    out = []
    for tensor, options in conditioning:
        changed = {**options, **values}
        added, earlier = values.get("hooks"), options.get("hooks")
        if append_hooks and added is not None and earlier is not None:
            changed["hooks"] = _after(earlier, added, cache)
        out.append([tensor, changed])
    return out


def _after(earlier: Any, hooks: HookGroup, cache: Combined) -> HookGroup | None:
    """The hooks that an entry has and those that are added.

    Raises:
        TypeError: What it has are no hooks.
    """
    if not hasattr(earlier, "clone_and_combine"):
        raise TypeError(
            "conditioning: expected a group of hooks as its option 'hooks', found "
            f"{str(earlier)[:100]!r}; a node before this one put it there"
        )
    if (earlier, hooks) not in cache:
        cache[earlier, hooks] = HookGroup.combine_all_hooks([earlier, hooks])
    return cache[earlier, hooks]


conditioning_set_values_with_hooks = conditioning_set_values


def set_hooks_for_conditioning(
    cond: Conditioning,
    hooks: HookGroup | None,
    append_hooks: bool = True,
    cache: Combined | None = None,
) -> Conditioning:
    """Give every entry a group of hooks; see `conditioning_set_values`."""
    if hooks is None:
        return cond
    return conditioning_set_values(cond, {"hooks": hooks}, append_hooks, cache)


def set_timestep_for_conditioning(cond: Conditioning, timestep_range: Range | None) -> Conditioning:
    """Restrict every entry to a part of the schedule, in percent."""
    if timestep_range is None:
        return cond
    start, end = timestep_range
    return conditioning_set_values(cond, {"start_percent": start, "end_percent": end})


def set_mask_for_conditioning(
    cond: Conditioning, mask: torch.Tensor | None, set_cond_area: str, strength: float
) -> Conditioning:
    """Restrict every entry to a mask [B, H, W] (or [H, W])."""
    if mask is None:
        return cond
    values = {
        "mask": mask.unsqueeze(0) if mask.ndim < 3 else mask,
        "set_area_to_bounds": set_cond_area != "default",
        "mask_strength": strength,
    }
    return conditioning_set_values(cond, values)


def combine_conditioning(conds: Sequence[Conditioning]) -> Conditioning:
    """The entries of several lists in one."""
    return [entry for cond in conds for entry in cond]


def _with_props(
    cond: Conditioning,
    strength: float,
    set_cond_area: str,
    mask: torch.Tensor | None,
    hooks: HookGroup | None,
    timesteps_range: Range | None,
    append_hooks: bool,
    cache: Combined,
) -> Conditioning:
    cond = set_hooks_for_conditioning(cond, hooks, append_hooks, cache)
    cond = set_mask_for_conditioning(cond, mask, set_cond_area, strength)
    return set_timestep_for_conditioning(cond, timesteps_range)


def set_conds_props(
    conds: Sequence[Conditioning],
    strength: float,
    set_cond_area: str,
    mask: torch.Tensor | None = None,
    hooks: HookGroup | None = None,
    timesteps_range: Range | None = None,
    append_hooks: bool = True,
) -> list[Conditioning]:
    """Set mask, hooks and range on several lists."""
    cache: Combined = {}
    return [
        _with_props(c, strength, set_cond_area, mask, hooks, timesteps_range, append_hooks, cache)
        for c in conds
    ]


def set_conds_props_and_combine(
    conds: Sequence[Conditioning],
    new_conds: Sequence[Conditioning],
    strength: float = 1.0,
    set_cond_area: str = "default",
    mask: torch.Tensor | None = None,
    hooks: HookGroup | None = None,
    timesteps_range: Range | None = None,
    append_hooks: bool = True,
) -> list[Conditioning]:
    """Set mask, hooks and range on new lists and join each to its counterpart."""
    prepared = set_conds_props(
        new_conds, strength, set_cond_area, mask, hooks, timesteps_range, append_hooks
    )
    return [combine_conditioning(pair) for pair in zip(conds, prepared)]


def combine_with_new_conds(
    conds: Sequence[Conditioning], new_conds: Sequence[Conditioning]
) -> list[Conditioning]:
    """Join each list with its counterpart."""
    return [combine_conditioning(pair) for pair in zip(conds, new_conds)]


def set_default_conds_and_combine(
    conds: Sequence[Conditioning],
    new_conds: Sequence[Conditioning],
    hooks: HookGroup | None = None,
    timesteps_range: Range | None = None,
    append_hooks: bool = True,
) -> list[Conditioning]:
    """Join lists whose entries apply wherever no other entry does."""
    out = []
    cache: Combined = {}
    for cond, default in zip(conds, new_conds):
        default = set_hooks_for_conditioning(default, hooks, append_hooks, cache)
        default = conditioning_set_values(default, {"default": True})
        default = set_timestep_for_conditioning(default, timesteps_range)
        out.append(combine_conditioning([cond, default]))
    return out
