"""Hooks: groups, schedules, and weights shown on top of a loaded view, resident or streamed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy import interrupt, ops
from comfy.patching import hook_conditioning
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.hook_group import (
    HookGroup,
    create_hook_lora,
    create_hook_model_as_lora,
    get_patch_weights_from_model,
)
from comfy.patching.hooks import (
    EnumHookMode,
    EnumHookType,
    EnumWeightTarget,
    Hook,
    TransformerOptionsHook,
    WeightHook,
    create_target_dict,
)
from comfy.patching.keyframes import HookKeyframe, HookKeyframeGroup, InterpolationMethod
from comfy.patching.patcher import ModelPatcher
from comfy.weights import arithmetic
from comfy.weights.adapters import LoRAAdapter
from tests.support.accelerator import CPU, Network, assert_untouched, bytes_of, snapshot

TARGET = create_target_dict(EnumWeightTarget.Model)


class Sampling:
    """Sigmas that fall linearly from 10 to 0."""

    @staticmethod
    def percent_to_sigma(percent: float) -> float:
        return 10.0 * (1.0 - percent)


class Sampled:
    model_sampling = Sampling()


def weight_hook(key: str, change: torch.Tensor, strength: float = 1.0) -> HookGroup:
    hook = WeightHook(strength_model=strength)
    hook.weights, hook.need_weight_init = {key: (change,)}, False
    group = HookGroup()
    group.add(hook)
    return group


def scheduled(*keyframes: tuple[float, float]) -> HookKeyframeGroup:
    group = HookKeyframeGroup()
    for strength, start in keyframes:
        group.add(HookKeyframe(strength, start))
    return group


def strengths_over(schedule: HookKeyframeGroup, sigmas: list[float]) -> list[float]:
    options = {"sample_sigmas": torch.tensor(sigmas)}
    schedule.initialize_timesteps(Sampled())
    out = []
    for sigma in sigmas:
        schedule.prepare_current_keyframe(sigma, options)
        out.append(schedule.strength)
    return out


def test_a_copy_of_a_hook_is_the_same_hook() -> None:
    hook = Hook(EnumHookType.Weight)
    assert hook.clone() == hook
    assert hash(hook.clone()) == hash(hook)
    assert Hook(EnumHookType.Weight) != hook


def test_a_group_holds_each_hook_once_and_combines_copies() -> None:
    a, b = WeightHook(), WeightHook()
    one, two = HookGroup(), HookGroup()
    one.add(a)
    two.add(a.clone())
    two.add(b)
    combined = HookGroup.combine_all_hooks([one, None, two])
    assert combined is not None
    assert len(combined) == 2
    assert one.is_subset_of(combined)
    assert len(one.new_with_common_hooks(two)) == 1
    assert HookGroup.combine_all_hooks([None]) is None
    with pytest.raises(ValueError, match="2 groups"):
        HookGroup.combine_all_hooks([one], require_count=2)


def test_strength_follows_the_keyframes_of_the_schedule() -> None:
    schedule = scheduled((0.0, 0.0), (1.0, 0.3), (0.5, 0.8))
    assert strengths_over(schedule, [10.0, 8.0, 6.9, 4.0, 1.9, 1.0]) == [0.0, 0.0, 1, 1, 0.5, 0.5]


def test_a_keyframe_lasts_its_guaranteed_steps() -> None:
    schedule = HookKeyframeGroup()
    schedule.add(HookKeyframe(1.0, 0.0, guarantee_steps=3))
    schedule.add(HookKeyframe(0.0, 0.1))
    assert strengths_over(schedule, [10.0, 8.0, 6.0, 4.0]) == [1.0, 1.0, 1.0, 0.0]


def test_a_keyframe_before_the_sampled_range_guarantees_nothing() -> None:
    schedule = HookKeyframeGroup()
    schedule.add(HookKeyframe(1.0, 0.0, guarantee_steps=2))
    schedule.add(HookKeyframe(0.5, 0.5))
    assert strengths_over(schedule, [4.0, 2.0]) == [0.5, 0.5]


def test_the_clip_schedule_cuts_time_where_any_strength_changes() -> None:
    one, two = WeightHook(), WeightHook()
    one.hook_keyframe = scheduled((1.0, 0.0), (0.0, 0.5))
    group = HookGroup()
    group.add(one)
    group.add(two)
    two.hook_keyframe = scheduled((1.0, 0.25))
    spans = [
        (span, [None if k is None else k.strength for _, k in active])
        for span, active in group.get_hooks_for_clip_schedule()
    ]
    assert spans == [
        ((0.0, 0.25), [1.0, None]),
        ((0.25, 0.5), [1.0, 1.0]),
        ((0.5, 1.0), [0.0, 1.0]),
    ]


@pytest.mark.parametrize("method", InterpolationMethod._LIST)
def test_interpolation_goes_from_end_to_end(method: str) -> None:
    values = InterpolationMethod.get_weights(0.2, 1.0, 5, method)
    assert values[0] == pytest.approx(0.2)
    assert values[-1] == pytest.approx(1.0)
    assert values == sorted(values)
    assert InterpolationMethod.get_weights(0.2, 1.0, 5, method, reverse=True) == values[::-1]


@pytest.mark.parametrize("mode", list(EnumHookMode))
@pytest.mark.parametrize("budget", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hook_weights_come_and_go_without_a_trace(
    accelerator: Any, mode: EnumHookMode, budget: int, dtype: torch.dtype
) -> None:
    model = Network(dtype=dtype, operations=ops.manual_cast)
    untouched = snapshot(model)
    device = torch.device(f"{accelerator.NAME}:0")
    patcher = ModelPatcher(model, device, CPU)
    patcher.set_hook_mode(mode)
    change = torch.randn_like(model.out.weight.float())
    patcher.add_patches({"out.weight": (change,)}, 0.5)
    patcher.patch_model(device, budget)
    x, tokens = torch.randn(1, 4, 8, 8, device=device), torch.tensor([1], device=device)
    with torch.inference_mode():
        plain = model(x, tokens).cpu()
        group = weight_hook("out.weight", change, 0.25)
        patcher.register_all_hook_patches(group, TARGET, {})
        outputs = []
        for hooks in (group, None, group, None):
            patcher.apply_hooks(hooks=hooks)
            outputs.append(model(x, tokens).cpu())
    assert torch.equal(outputs[1], plain)
    assert torch.equal(outputs[3], plain)
    assert torch.equal(outputs[0], outputs[2])
    stored = (untouched["out.weight"][1].float() + 0.5 * change).to(dtype)
    expected = (stored.float() + 0.25 * change).to(dtype)
    view = ModelPatcher(Network(dtype=dtype, operations=ops.manual_cast), CPU, CPU)
    view.add_patches({"out.weight": ("set", (expected,))})
    assert torch.equal(view.patch_model(CPU)(x.cpu(), tokens.cpu()), outputs[0])
    patcher.cleanup()
    patcher.detach()
    assert_untouched(model, untouched)
    assert torch.accelerator.memory_allocated(0) == x.nbytes + tokens.nbytes


def test_a_scheduled_hook_changes_strength_between_steps() -> None:
    model = Network()
    patcher = ModelPatcher(model, CPU, CPU)
    group = weight_hook("out.bias", torch.ones(4))
    group.set_keyframes_on_hooks(scheduled((0.0, 0.0), (1.0, 0.5)))
    patcher.patch_model(CPU)
    patcher.register_all_hook_patches(group, TARGET, {})
    group.hooks[0].initialize_timesteps(Sampled())
    options = {"transformer_options": {"sample_sigmas": torch.tensor([10.0, 0.0])}}
    plain = model.out.bias.clone()
    added = []
    for sigma in (10.0, 8.0, 5.0, 1.0):
        patcher.prepare_hook_patches_current_keyframe(torch.tensor([sigma]), group, options)
        patcher.apply_hooks(hooks=group)
        added.append((model.out.bias - plain)[0].item())
    assert added == pytest.approx([0.0, 0.0, 1.0, 1.0], abs=1e-6)
    patcher.cleanup()
    assert torch.equal(model.out.bias, plain)


def test_a_failure_while_hook_weights_are_shown_leaves_none() -> None:
    model = Network()
    untouched = snapshot(model)
    patcher = ModelPatcher(model, CPU, CPU)
    group = weight_hook("out.weight", torch.ones_like(model.out.weight))
    patcher.register_all_hook_patches(group, TARGET, {})
    broken = WeightHook()
    broken.weights, broken.need_weight_init = {"conv.weight": (None,)}, False
    group.add(broken)
    patcher.register_all_hook_patches(group, TARGET, {})
    with pytest.raises(AttributeError):
        patcher.patch_hooks(group)
    assert_untouched(model, untouched)


def test_registered_hooks_are_forgotten_after_the_run() -> None:
    patcher = ModelPatcher(Network(), CPU, CPU)
    group = weight_hook("out.bias", torch.ones(4))
    registered = patcher.register_all_hook_patches(group, TARGET, {})
    assert len(registered) == 1
    assert patcher.hook_patches
    patcher.restore_hook_patches()
    assert not patcher.hook_patches


def test_options_of_a_hook_reach_only_entries_that_carry_it() -> None:
    from comfy.patching.hooks import EnumHookScope

    everywhere = TransformerOptionsHook({"wrappers": {"k": {None: [1]}}})
    here = TransformerOptionsHook({"patches": {"p": [2]}}, EnumHookScope.HookedOnly)
    group = HookGroup()
    group.add(everywhere)
    group.add(here)
    patcher = ModelPatcher(Network(), CPU, CPU)
    options: dict[str, Any] = {}
    for hook in group.hooks:
        assert hook.add_hook_patches(patcher, options, TARGET, HookGroup())
    assert options["transformer_options"] == {"wrappers": {"k": {None: [1]}}}
    assert patcher.apply_hooks(hooks=group) == {"patches": {"p": [2]}}
    assert patcher.apply_hooks(hooks=None) == {}


@pytest.mark.parametrize("budget", [0, 1, 9000])
@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
def test_a_hook_can_turn_a_model_into_another(
    accelerator: Any, kind: type[ModelPatcher], budget: int
) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    model, other = Network(operations=ops.manual_cast, seed=0), Network(seed=1)
    patcher = kind(model, device, CPU)
    patcher.add_patches({"out.bias": (torch.ones(4),)})  # stays beside the difference
    weights = get_patch_weights_from_model(ModelPatcher(other, CPU, CPU))
    group = create_hook_model_as_lora(weights, None, 1.0, 1.0)
    patcher.patch_model(device, budget)
    patcher.register_all_hook_patches(group, TARGET, {})
    patcher.apply_hooks(hooks=group)
    x, tokens = torch.randn(1, 4, 8, 8), torch.tensor([1])
    got = model(x.to(device), tokens.to(device)).cpu()
    want = other(x, tokens) + other.scale * other.table[1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_lora_file_becomes_a_hook_whose_keys_are_matched_on_registration() -> None:
    model = Network()
    model.diffusion_model = torch.nn.Module()
    model.diffusion_model.layer = torch.nn.Linear(2, 2)
    lora = {
        "lora_unet_layer.lora_up.weight": torch.ones(2, 1),
        "lora_unet_layer.lora_down.weight": torch.ones(1, 2),
    }
    patcher = ModelPatcher(model, CPU, CPU)
    patcher.register_all_hook_patches(create_hook_lora(lora, 0.5, 1.0), TARGET, {})
    ((_, table),) = patcher.hook_patches.items()
    assert list(table) == ["diffusion_model.layer.weight"]
    assert table["diffusion_model.layer.weight"][0][0] == 0.5


def test_conditioning_gets_hooks_masks_and_ranges_without_losing_its_own() -> None:
    mine, theirs = weight_hook("a", torch.ones(1)), weight_hook("b", torch.ones(1))
    cond = [[torch.zeros(1), {"hooks": mine, "keep": 1}]]
    (out,) = hook_conditioning.set_conds_props(
        [cond], 0.5, "mask bounds", mask=torch.ones(8, 8), hooks=theirs, timesteps_range=(0.1, 0.9)
    )
    options = out[0][1]
    assert len(options["hooks"]) == 2
    assert options["mask"].shape == (1, 8, 8)
    assert options["set_area_to_bounds"] is True
    assert (options["mask_strength"], options["start_percent"], options["end_percent"]) == (
        0.5,
        0.1,
        0.9,
    )
    assert cond[0][1] == {"hooks": mine, "keep": 1}
    (joined,) = hook_conditioning.set_default_conds_and_combine([cond], [cond], hooks=theirs)
    assert [entry[1].get("default") for entry in joined] == [None, True]


def test_loaded_bytes_do_not_count_what_hooks_computed(accelerator: Any) -> None:
    model = Network()
    device = torch.device(f"{accelerator.NAME}:0")
    patcher = ModelPatcher(model, device, CPU)
    patcher.patch_model(device)
    group = weight_hook("out.weight", torch.ones(4, 32, 1, 1))
    patcher.register_all_hook_patches(group, TARGET, {})
    patcher.apply_hooks(hooks=group)
    assert patcher.loaded_size() == bytes_of(model)
    assert patcher.residence.hook_bytes == model.out.weight.nbytes
    assert patcher.residence.device_bytes == torch.accelerator.memory_allocated(0)
    patcher.cleanup()
    assert patcher.residence.hook_bytes == 0
    assert torch.accelerator.memory_allocated(0) == bytes_of(model)
    patcher.apply_hooks(hooks=group)
    patcher.clone().detach()  # what one view computed goes too, whichever view is taken off
    assert torch.accelerator.memory_allocated(0) == 0


@pytest.mark.parametrize("budget", [0, 1, 9000])
@pytest.mark.parametrize("kind", [ModelPatcher, ModelPatcherDynamic])
def test_a_patch_can_turn_a_model_into_another(
    accelerator: Any, kind: type[ModelPatcher], budget: int
) -> None:
    device = torch.device(f"{accelerator.NAME}:0")
    model, other = Network(operations=ops.manual_cast, seed=0), Network(seed=1)
    before = snapshot(model)
    patcher = kind(model, device, CPU)
    patcher.add_patches({"out.bias": (torch.ones(4),)})  # stays beside the difference
    difference = get_patch_weights_from_model(ModelPatcher(other, CPU, CPU))
    assert difference is not None
    assert set(patcher.add_patches(difference)) == set(model.state_dict())
    patcher.patch_model(device, budget)
    x, tokens = torch.randn(1, 4, 8, 8), torch.tensor([1])
    got = model(x.to(device), tokens.to(device)).cpu()
    want = other(x, tokens) + other.scale * other.table[1]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    patcher.detach()
    assert_untouched(model, before)


def test_the_weights_of_a_model_as_lora_are_those_of_its_file_whatever_is_loaded() -> None:
    other = Network(seed=1)
    plain = {key: t.clone() for key, t in other.state_dict().items()}
    patcher = ModelPatcher(other, CPU, CPU)
    patcher.add_patches({"out.bias": (torch.ones(4),)})
    patcher.patch_model(CPU)
    weights = get_patch_weights_from_model(patcher)
    assert weights is not None
    assert all(torch.equal(value[1][0], plain[key]) for key, value in weights.items())


def test_part_of_a_weight_can_be_turned_into_anothers() -> None:
    mine, other = torch.randn(6, 4), torch.randn(6, 4)
    for content in (other, other[2:5]):  # the whole weight, or the part alone
        patch = (0.5, ("model_as_lora", (content,)), 1.0, (0, 2, 3), None)
        made = arithmetic.calculate_weight([patch], mine.clone(), "w")
        torch.testing.assert_close(made[2:5], (mine[2:5] + other[2:5]) / 2)
        assert torch.equal(made[:2], mine[:2])
        assert torch.equal(made[5:], mine[5:])


@pytest.mark.parametrize("mode", list(EnumHookMode))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_hooks_with_keyframes_equal_patches_of_their_strength_on_the_cpu(
    mode: EnumHookMode, dtype: torch.dtype
) -> None:
    def lora(seed: int) -> dict[Any, Any]:
        generator = torch.Generator().manual_seed(seed)
        up, down = (torch.randn(s, generator=generator) for s in ((64, 4), (4, 32)))
        conv = (
            torch.randn(32, 2, 1, 1, generator=generator),
            torch.randn(2, 4, 3, 3, generator=generator),
        )
        return {
            "blocks.0.up.weight": LoRAAdapter(set(), (up, down, 2.0, None, None, None)),
            "conv.weight": LoRAAdapter(set(), (*conv, None, None, None, None)),
            "out.bias": (torch.ones(4),),
        }

    model = Network(operations=ops.manual_cast, dtype=dtype)
    before = snapshot(model)
    patcher = ModelPatcher(model, CPU, CPU)
    patcher.add_patches(lora(1), 0.5)  # stays below what the hooks add
    patcher.set_hook_mode(mode)
    groups = {}
    for seed in (2, 3):
        hook = WeightHook()
        hook.weights, hook.need_weight_init = lora(seed), False
        hook.hook_keyframe = HookKeyframeGroup()
        for strength, start in ((1.0, 0.0), (0.25, 0.5)):
            hook.hook_keyframe.add(HookKeyframe(strength, start))
        groups[seed] = HookGroup()
        groups[seed].add(hook)
    everything = HookGroup.combine_all_hooks(list(groups.values()))
    assert everything is not None
    patcher.patch_model(CPU)
    patcher.register_all_hook_patches(everything, TARGET, {})
    for hook in everything.hooks:
        hook.initialize_timesteps(Sampled())
    options = {"transformer_options": {"sample_sigmas": torch.tensor([10.0, 8.0, 4.0, 1.0])}}
    for sigma, strength in ((10.0, 1.0), (8.0, 1.0), (4.0, 0.25), (1.0, 0.25)):
        for seed, group in groups.items():
            patcher.prepare_hook_patches_current_keyframe(torch.tensor([sigma]), group, options)
            patcher.apply_hooks(hooks=group)
            twin = ModelPatcher(Network(dtype=dtype), CPU, CPU)
            twin.add_patches(lora(1), 0.5)
            twin.patch_model(CPU)
            shown = ModelPatcher(Network(dtype=dtype), CPU, CPU)
            shown.model.load_state_dict(twin.model_state_dict())
            shown.add_patches(lora(seed), strength)
            want = shown.patch_model(CPU).state_dict()
            assert all(torch.equal(t, want[k]) for k, t in model.state_dict().items())
    kept = sum(len(table) for table in patcher.cached_hook_patches.values())
    assert kept == (6 if mode == EnumHookMode.MaxSpeed else 0)
    patcher.cleanup()
    patcher.detach()
    assert_untouched(model, before)


def test_a_cancellation_between_weights_of_a_hook_shows_the_view_alone() -> None:
    model = Network()
    patcher = ModelPatcher(model, CPU, CPU)
    patcher.patch_model(CPU)
    before = snapshot(model)
    group = weight_hook("out.bias", torch.ones(4))
    patcher.register_all_hook_patches(group, TARGET, {})
    interrupt.interrupt_current_processing(True)
    with pytest.raises(interrupt.InterruptProcessingException):
        patcher.apply_hooks(hooks=group)
    assert_untouched(model, before)
    patcher.apply_hooks(hooks=group)
    assert torch.equal(model.out.bias, before["out.bias"][1] + 1)
