"""Hooks of conditioning entries in whole runs: weights, options, models, control nets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import EnumHookScope, TransformerOptionsHook, WeightHook
from comfy.patching.keyframes import HookKeyframe, HookKeyframeGroup
from comfy.sampling import hooked, run, samplers
from comfy_extras import nodes_hooks
from tests.comfy.sampling.support import TestModel, context, patcher

ZEROS = torch.zeros(1, 4, 4, 4)


class WeightedModel(TestModel):
    """The estimate is one weight plus the mean of the context."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.ones(1), requires_grad=False)
        self.options_seen: list[dict[str, Any]] = []

    def apply_model(
        self, x: Tensor, t: Tensor, c_crossattn: Tensor, transformer_options: Any = None, **kw: Any
    ) -> Tensor:
        self.note_call(x, t, c_crossattn, transformer_options)
        self.options_seen.append(transformer_options)
        mean = c_crossattn.mean(dim=(1, 2)).reshape(-1, 1, 1, 1)
        return torch.zeros_like(x) + self.level + mean


def weight_hook(difference: float, strength: float = 1.0) -> WeightHook:
    hook = WeightHook(strength_model=strength)
    hook.weights = {"level": ("diff", (torch.tensor([difference]),))}
    hook.need_weight_init = False
    return hook


def group(*hooks: Any) -> HookGroup:
    made = HookGroup()
    for hook in hooks:
        made.add(hook)
    return made


def one_step(model: Any, positive: list[Any], negative: list[Any], cfg: float) -> float:
    made = run.sample_custom(
        model, ZEROS, cfg, samplers.ksampler("euler"), torch.tensor([1.0, 0.0]), positive, negative,
        ZEROS, disable_pbar=True, seed=0,
    )  # fmt: skip
    return float(made.mean())


def entry(value: float, **options: Any) -> list[Any]:
    return [[context([value] * 4), options]]


def test_an_entry_is_evaluated_with_its_own_weights() -> None:
    model = patcher(WeightedModel())
    hooks = group(weight_hook(10.0))
    # positive: 1 + 10 + 2, negative: 1 + 0
    made = one_step(model, entry(2.0, hooks=hooks), entry(0.0), cfg=3.0)
    assert made == 1.0 + 3.0 * (13.0 - 1.0)
    assert float(model.model.level) == 1.0
    assert len(model.model.calls) == 2  # different weights cannot share a call


def test_entries_of_one_group_share_a_call() -> None:
    model = patcher(WeightedModel())
    hooks = group(weight_hook(10.0, strength=0.5))
    made = one_step(model, entry(2.0, hooks=hooks), entry(0.0, hooks=hooks), cfg=1.5)
    assert made == 6.0 + 1.5 * 2.0
    assert len(model.model.calls) == 1


def test_a_pair_and_its_entries_share_a_call_also_after_hooks_were_added_twice() -> None:
    model = patcher(WeightedModel())
    pair = (entry(2.0) + entry(3.0), entry(0.0))
    for hook in (weight_hook(10.0), weight_hook(1.0)):
        pair = nodes_hooks.PairConditioningSetProperties().run(
            *pair, 1.0, "default", hooks=group(hook)
        )
    made = one_step(model, *pair, cfg=2.0)
    assert made == 12.0 + 2.0 * 2.5
    assert len(model.model.calls) == 1


def test_strength_follows_the_keyframes_of_a_run() -> None:
    model = patcher(WeightedModel())
    hook = weight_hook(10.0)
    schedule = HookKeyframeGroup()
    schedule.add(HookKeyframe(strength=0.0, start_percent=0.0))
    schedule.add(HookKeyframe(strength=1.0, start_percent=0.5))
    hook.hook_keyframe = schedule
    seen: list[float] = []
    run.sample_custom(
        model, ZEROS, 1.0, samplers.ksampler("euler"), torch.tensor([14.0, 5.0, 0.5, 0.1, 0.0]),
        entry(0.0, hooks=group(hook)), entry(0.0), ZEROS, disable_pbar=True, seed=0,
        callback=lambda i, denoised, x, total: seen.append(float(denoised.mean())),
    )  # fmt: skip
    assert seen == [1.0, 1.0, 11.0, 11.0]


def test_options_of_a_hook_reach_only_its_entry_or_all() -> None:
    for scope, expected in (
        (EnumHookScope.HookedOnly, [False, True]),
        (EnumHookScope.AllConditioning, [True, True]),
    ):
        model = patcher(WeightedModel())
        hook = TransformerOptionsHook({"mark": {"on": True}}, hook_scope=scope)
        one_step(model, entry(1.0, hooks=group(hook)), entry(0.0), cfg=2.0)
        flags = {}
        for call, options in zip(model.model.calls, model.model.options_seen):
            for index in call["cond_or_uncond"]:
                flags[index] = "mark" in options
        assert [flags[1], flags[0]] == expected
        assert "mark" not in model.model_options["transformer_options"]


def test_hooks_of_a_control_net_count_for_its_entry() -> None:
    extra, own = group(weight_hook(1.0)), group(weight_hook(2.0))
    control = SimpleNamespace(get_extra_hooks=lambda: [extra])
    conds = {"positive": [{"control": control, "hooks": own}, {"control": control, "hooks": own}]}
    hooked.share_control_hooks(conds)
    first, second = (e["hooks"] for e in conds["positive"])
    assert first is second
    assert len(first) == 2
    assert len(own) == 1


def test_hooks_that_refuse_are_taken_off() -> None:
    model = patcher(WeightedModel())
    hook = weight_hook(10.0)
    hook.custom_should_register = lambda *args: False
    made = one_step(model, entry(2.0, hooks=group(hook)), entry(0.0), cfg=1.0)
    assert made == 3.0


def test_everything_is_undone_after_an_error() -> None:
    model = patcher(WeightedModel())
    options = model.model_options
    broken = lambda *args, **kwargs: 1 / 0  # noqa: E731
    try:
        run.sample_custom(
            model, ZEROS, 1.0, samplers.KSAMPLER(broken), torch.tensor([1.0, 0.0]),
            entry(2.0, hooks=group(weight_hook(10.0))), entry(0.0), ZEROS, seed=0,
        )  # fmt: skip
    except ZeroDivisionError:
        pass
    assert model.model_options is options
    assert model.hook_patches == {}
    assert float(model.model.level) == 1.0
    assert model.model.current_patcher is None
