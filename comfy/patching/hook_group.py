"""Groups of hooks, as conditioning entries carry them, and the ways to make one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from comfy.patching.hooks import (
    EnumHookType,
    EnumWeightTarget,
    Hook,
    WeightHook,
    create_target_dict,
)
from comfy.patching.keyframes import HookKeyframe, HookKeyframeGroup, schedule_ranges


class HookGroup:
    """Hooks in order, each once."""

    def __init__(self) -> None:
        self.hooks: list[Hook] = []
        self._hook_dict: dict[Any, list[Hook]] = {}

    def __len__(self) -> int:
        return len(self.hooks)

    def add(self, hook: Hook) -> None:
        """Add a hook unless it is there."""
        if hook not in self.hooks:
            self.hooks.append(hook)
            self._hook_dict.setdefault(hook.hook_type, []).append(hook)

    def remove(self, hook: Hook) -> None:
        """Remove a hook if it is there."""
        if hook in self.hooks:
            self.hooks.remove(hook)
            self._hook_dict[hook.hook_type].remove(hook)

    def get_type(self, hook_type: EnumHookType) -> list[Any]:
        """The hooks of one type."""
        return self._hook_dict.get(hook_type, [])

    def contains(self, hook: Hook) -> bool:
        """Whether a hook, or a copy of it, is there."""
        return hook in self.hooks

    def is_subset_of(self, other: HookGroup) -> bool:
        """Whether all hooks are in another group too."""
        return all(other.contains(hook) for hook in self.hooks)

    def new_with_common_hooks(self, other: HookGroup) -> HookGroup:
        """A group of copies of the hooks both have."""
        common = HookGroup()
        for hook in self.hooks:
            if other.contains(hook):
                common.add(hook.clone())
        return common

    def clone(self) -> HookGroup:
        """A group of copies."""
        copied = HookGroup()
        for hook in self.hooks:
            copied.add(hook.clone())
        return copied

    def clone_and_combine(self, other: HookGroup | None) -> HookGroup:
        """A group of copies of the hooks of both."""
        combined = self.clone()
        for hook in other.hooks if other is not None else ():
            combined.add(hook.clone())
        return combined

    def set_keyframes_on_hooks(self, hook_kf: HookKeyframeGroup | None) -> None:
        """Give all hooks one schedule; a copy of it, so that groups do not share progress."""
        schedule = HookKeyframeGroup() if hook_kf is None else hook_kf.clone()
        for hook in self.hooks:
            hook.hook_keyframe = schedule

    def get_hooks_for_clip_schedule(
        self,
    ) -> list[tuple[tuple[float, float], list[tuple[Hook, HookKeyframe | None]]]]:
        """The stretches of the schedule in which all weight hooks are constant.

        Returns:
            ((start, end) percent, [(hook, keyframe in effect)]) in order.
        """
        ranges = {
            hook: schedule_ranges(hook.hook_keyframe.keyframes)
            for hook in self.get_type(EnumHookType.Weight)
        }
        spans = [span for found in ranges.values() for span, _ in found]
        edges = {0.0, 1.0, *itertools.chain.from_iterable(spans)}
        out = []
        for start, end in itertools.pairwise(sorted(edges)):
            active = []
            for hook, found in ranges.items():
                inside = (k for (a, b), k in found if a < end and b > start)
                active.append((hook, next(inside, None)))
            out.append(((start, end), active))
        return out

    def reset(self) -> None:
        """Go back to the start of all schedules."""
        for hook in self.hooks:
            hook.reset()

    @staticmethod
    def combine_all_hooks(
        hooks_list: Iterable[HookGroup | None], require_count: int = 0
    ) -> HookGroup | None:
        """One group of the hooks of several; None when there is no group at all.

        Args:
            hooks_list: Groups; None does not count.
            require_count: How many groups there must be.
        Raises:
            ValueError: There are fewer.
        """
        groups = [group for group in hooks_list if group is not None]
        if len(groups) < require_count:
            raise ValueError(f"{require_count} groups of hooks are needed, {len(groups)} given")
        if not groups:
            return None
        if len(groups) == 1:
            return groups[0]
        combined = groups[0].clone()
        for group in groups[1:]:
            combined = combined.clone_and_combine(group)
        return combined


def same_hooks(a: HookGroup | None, b: HookGroup | None) -> bool:
    """Whether two groups, or their absence, hold the same hooks."""
    if a is None or b is None:
        return a is b
    return len(a) == len(b) and a.is_subset_of(b)


def create_hook_lora(
    lora: dict[str, Any], strength_model: float, strength_clip: float
) -> HookGroup:
    """A group with one weight hook that holds a LoRA file."""
    hook = WeightHook(strength_model=strength_model, strength_clip=strength_clip)
    hook.weights = lora
    group = HookGroup()
    group.add(hook)
    return group


def create_hook_model_as_lora(
    weights_model: dict[str, Any] | None,
    weights_clip: dict[str, Any] | None,
    strength_model: float,
    strength_clip: float,
) -> HookGroup:
    """A group with one weight hook that turns a model into another one."""
    hook = WeightHook(strength_model=strength_model, strength_clip=strength_clip)
    hook.need_weight_init = False
    hook.weights = weights_model
    hook.weights_clip = weights_clip
    group = HookGroup()
    group.add(hook)
    return group


def get_patch_weights_from_model(
    model: Any, discard_model_sampling: bool = True
) -> dict[str, Any] | None:
    """A model's weights as patches that turn another model of the family into it."""
    if model is None:
        return None
    return {
        key: ("model_as_lora", patches[0])  # the plain weight, whatever is loaded, and its decoder
        for key, patches in model.get_key_patches().items()
        if not (discard_model_sampling and key.startswith("model_sampling."))
    }


def load_hook_lora_for_models(
    model: Any, clip: Any, lora: dict[str, Any], strength_model: float, strength_clip: float
) -> tuple[Any, Any, HookGroup]:
    """(model or None, clip or None, hooks): views with a LoRA registered as a hook."""
    group = create_hook_lora(lora, strength_model, strength_clip)
    views = []
    for owner, target in ((model, EnumWeightTarget.Model), (clip, EnumWeightTarget.Clip)):
        view = owner.clone() if owner is not None else None
        if view is not None:
            patcher = getattr(view, "patcher", view)
            patcher.register_all_hook_patches(group, create_target_dict(target))
        views.append(view)
    return views[0], views[1], group


def create_transformer_options_from_hooks(
    model: Any, hooks: HookGroup | None, transformer_options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The options an entry's hooks add to `transformer_options`."""
    options = {} if transformer_options is None else transformer_options
    if hooks is not None:
        for hook in hooks.get_type(EnumHookType.TransformerOptions):
            hook.on_apply_hooks(model, options)
    return options


def get_sorted_list_via_attr(objects: list[Any], attr: str) -> list[Any]:
    """Objects in order of an attribute; equal ones keep their order, and None means 0."""
    return sorted(objects, key=lambda o: getattr(o, attr, None) or 0)
