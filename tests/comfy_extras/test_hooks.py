"""Hook nodes: what they put on conditioning, and schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import WeightHook
from comfy_extras import nodes_hooks

COND = [[torch.zeros(1, 2, 3), {"strength": 1.0}]]


def group(*hooks: Any) -> HookGroup:
    made = HookGroup()
    for hook in hooks:
        made.add(hook)
    return made


def test_properties_are_set_on_copies() -> None:
    hooks, mask = group(WeightHook()), torch.ones(8, 8)
    node = nodes_hooks.ConditioningSetPropertiesAndCombine()
    (made,) = node.run(COND, COND, 0.5, "mask bounds", mask, hooks, (0.2, 0.6))
    assert made[0][1] == {"strength": 1.0}
    options = made[1][1]
    assert options["hooks"] is hooks
    assert options["mask"].shape == (1, 8, 8)
    assert (options["set_area_to_bounds"], options["mask_strength"]) == (True, 0.5)
    assert (options["start_percent"], options["end_percent"]) == (0.2, 0.6)
    assert "hooks" not in COND[0][1]


def test_a_pair_gets_a_default_pair() -> None:
    node = nodes_hooks.PairConditioningSetDefaultCombine()
    positive, negative = node.run(COND, COND, COND, COND, group(WeightHook()))
    for made in (positive, negative):
        assert [bool(options.get("default")) for _, options in made] == [False, True]
    both = nodes_hooks.PairConditioningCombine().run(COND, COND, COND, COND)
    assert [len(made) for made in both] == [2, 2]


def test_ranges_before_and_after() -> None:
    made = nodes_hooks.ConditioningTimestepsRange().run(0.25, 0.75)
    assert made == ((0.25, 0.75), (0.0, 0.25), (0.75, 1.0))


def test_schedules_are_built_up_without_changing_earlier_ones() -> None:
    (first,) = nodes_hooks.CreateHookKeyframe().run(0.5, 0.0)
    (second,) = nodes_hooks.CreateHookKeyframesInterpolated().run(
        1.0, 0.0, "linear", 0.5, 1.0, 3, prev_hook_kf=first
    )
    assert len(first.keyframes) == 1
    assert [(k.strength, k.start_percent) for k in second.keyframes] == [
        (0.5, 0.0), (1.0, 0.5), (0.5, 0.75), (0.0, 1.0),
    ]  # fmt: skip
    (third,) = nodes_hooks.CreateHookKeyframesFromFloats().run([1, 2], 0.0, 0.5)
    assert [(k.strength, k.start_percent) for k in third.keyframes] == [(1.0, 0.0), (2.0, 0.5)]
    with pytest.raises(TypeError, match="number or a list of numbers, not object"):
        nodes_hooks.CreateHookKeyframesFromFloats().run(object(), 0.0, 0.5)
    hooks = group(WeightHook())
    (scheduled,) = nodes_hooks.SetHookKeyframes().run(hooks, second)
    assert len(scheduled.hooks[0].hook_keyframe.keyframes) == 4
    assert not hooks.hooks[0].hook_keyframe.keyframes


def test_groups_are_joined_in_order() -> None:
    first, second = WeightHook(), WeightHook()
    (made,) = nodes_hooks.CombineHooks4().run(hooks_A=group(first), hooks_D=group(second))
    assert made.hooks == [first, second]
    assert nodes_hooks.CombineHooks2().run() == (None,)


def test_a_lora_of_no_strength_makes_no_hook() -> None:
    (made,) = nodes_hooks.CreateHookLora().run("missing.safetensors", 0, 0)
    assert len(made) == 0


def test_hooks_of_a_text_encoder_are_registered_on_a_view() -> None:
    registered: list[Any] = []
    patcher = SimpleNamespace(
        forced_hooks=None, register_all_hook_patches=lambda *args: registered.append(args)
    )
    clip = SimpleNamespace(apply_hooks_to_conds=None, use_clip_schedule=False, patcher=patcher)
    clip.clone = lambda: SimpleNamespace(**vars(clip))
    hooks = group(WeightHook())
    (view,) = nodes_hooks.SetClipHooks().run(clip, True, True, hooks)
    assert view.apply_hooks_to_conds is hooks
    assert view.use_clip_schedule
    assert registered[0][0] is hooks
    assert clip.apply_hooks_to_conds is None
