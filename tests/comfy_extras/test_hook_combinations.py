"""Hooks together with context windows, regions, control nets and ranges, against steps by hand.

By hand: at each step of euler each text is evaluated by a view of the model with the LoRA of the
strength that its hooks have then, alone; estimates are averaged under the weights of the regions
or windows. A step of euler is linear in the estimate, so steps may be averaged in its place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy import loading
from comfy.control.networks import ControlNet
from comfy.patching import hook_group
from comfy.patching.keyframes import HookKeyframe, HookKeyframeGroup
from comfy.sampling import noise, window_schedules
from comfy_extras import nodes_context_windows, nodes_hooks
from comfy_extras.hook_nodes.conditioning import (
    PairConditioningSetDefaultCombine,
    PairConditioningSetProperties,
    PairConditioningSetPropertiesAndCombine,
)
from comfy_nodes.control import ControlNetApplyAdvanced
from tests.comfy_extras import test_hook_runs
from tests.comfy_extras.test_hook_runs import SIGMAS, Models, encoded

models = test_hook_runs.models
FRAMES, SIDE = 6, 8
SCHEDULE_A = {0.0: 0.25, 0.4: 1.0, 0.7: -0.5}
SCHEDULE_B = {0.0: 1.0, 0.5: 0.3}
STRENGTH_A, STRENGTH_B = 0.8, -0.6
CFG = 3.0


def hooks_of(lora: dict[str, Tensor], strength: float, schedule: dict[float, float]) -> Any:
    keyframes = HookKeyframeGroup()
    for start, amount in schedule.items():
        keyframes.add(HookKeyframe(amount, start))
    hooks = hook_group.create_hook_lora(lora, strength, 0.0)
    return nodes_hooks.SetHookKeyframes().run(hooks, keyframes)[0]


def pair_of(clip: Any, text: str) -> tuple[Any, Any]:
    return encoded(clip, text), encoded(clip, "blue")


def sampled(model: Any, pair: Any, start: Tensor, latent: Tensor, sigmas: Tensor) -> Tensor:
    from comfy.sampling import run, samplers

    return run.sample_custom(
        model, start, CFG, samplers.ksampler("euler"), sigmas, *pair, latent, disable_pbar=True,
        seed=3,
    )  # fmt: skip


class ByHand:
    """Steps of views of a model that have LoRAs of the strengths of a time."""

    def __init__(self, models: Models) -> None:
        self.model, self.clip, self.lora = models

    def strength(self, schedule: dict[float, float], sigma: float) -> float:
        to_sigma = self.model.model.model_sampling.percent_to_sigma
        return [amount for begin, amount in schedule.items() if sigma <= to_sigma(begin)][-1]

    def step(self, x: Tensor, sigmas: Tensor, pair: Any, amount: float) -> Tensor:
        """x at the second of two levels, for one text alone."""
        view, _ = loading.load_lora_for_models(self.model, self.clip, self.lora, amount, 0.0)
        before = self.model.model.process_latent_out(x)
        after = sampled(view, pair, torch.zeros_like(x), before, sigmas)
        return self.model.model.process_latent_in(after)

    def run(self, start: Tensor, step: Any) -> Tensor:
        x = start * SIGMAS[0]
        for place in range(len(SIGMAS) - 1):
            x = step(x, SIGMAS[place : place + 2])
        return self.model.model.process_latent_out(x)


def check(made: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(made, expected, rtol=0, atol=2e-4 * float(expected.std()))


def start_of(*shape: int) -> tuple[Tensor, Tensor]:
    latent = torch.zeros(shape)
    return noise.prepare_noise(latent, 3), latent


@pytest.mark.parametrize("dim", [0, 2, 3])
@pytest.mark.parametrize("schedule", ["standard_static", "looped_uniform"])
def test_windows_are_evaluated_with_the_hooks_of_their_time(
    models: Models, dim: int, schedule: str
) -> None:
    model, clip, lora = models
    start, latent = start_of(*((FRAMES, 4, SIDE, SIDE) if dim == 0 else (1, 4, 12, 12)))
    length, overlap = (4, 2) if dim == 0 else (8, 4)
    windowed = nodes_context_windows.windowed(
        model, schedule, "pyramid", False, context_length=length, context_overlap=overlap, dim=dim
    )
    pair = pair_of(clip, "a red circle")
    hooks = hooks_of(lora, STRENGTH_A, SCHEDULE_A)
    hooked = PairConditioningSetProperties().run(*pair, 1.0, "default", hooks=hooks)
    made = sampled(windowed, hooked, start, latent, SIGMAS)
    hand = ByHand(models)
    handler = windowed.model_options["context_handler"]

    def step(x: Tensor, sigmas: Tensor) -> Tensor:
        amount = STRENGTH_A * hand.strength(SCHEDULE_A, float(sigmas[0]))
        options: Any = {"transformer_options": {"sample_sigmas": SIGMAS}}
        handler.set_step(sigmas[:1], options)
        total, weight = torch.zeros_like(x), torch.zeros_like(x)
        for window in handler.get_context_windows(model, x, options):
            place = (*(slice(None),) * dim, window.index_list)
            weights = torch.tensor(window_schedules.pyramid_weights(len(window.index_list)))
            shaped = weights.reshape(-1, *(1,) * (x.ndim - 1 - dim)).to(x)
            total[place] += hand.step(x[place], sigmas, pair, amount) * shaped
            weight[place] += shaped
        return total / weight

    check(made, hand.run(start, step))


def test_regions_have_the_hooks_of_their_own_and_the_default_the_rest(models: Models) -> None:
    model, clip, lora = models
    start, latent = start_of(1, 4, 16, 16)
    generator = torch.Generator().manual_seed(5)
    masks = torch.rand(2, 1, 16, 16, generator=generator) * 0.4 + 0.1
    masks[0, :, 8:], masks[1, :, :, :4] = 0.0, 0.0
    texts = [pair_of(clip, text) for text in ("a red circle", "a green box", "a grey sky")]
    schedules = (hooks_of(lora, STRENGTH_A, SCHEDULE_A), hooks_of(lora, STRENGTH_B, SCHEDULE_B))
    pair = PairConditioningSetProperties().run(
        *texts[0], 1.0, "default", mask=masks[0], hooks=schedules[0]
    )
    pair = PairConditioningSetPropertiesAndCombine().run(
        *pair, *texts[1], 1.0, "default", mask=masks[1], hooks=schedules[1]
    )
    pair = PairConditioningSetDefaultCombine().run(*pair, *texts[2])
    made = sampled(model, pair, start, latent, SIGMAS)
    hand = ByHand(models)
    rest = (1.0 - masks.sum(dim=0)).clamp(min=0.0)

    def step(x: Tensor, sigmas: Tensor) -> Tensor:
        amounts = [
            STRENGTH_A * hand.strength(SCHEDULE_A, float(sigmas[0])),
            STRENGTH_B * hand.strength(SCHEDULE_B, float(sigmas[0])),
            0.0,
        ]
        weights = [masks[0], masks[1], rest]
        steps = [
            hand.step(x, sigmas, text, amount) * weight
            for text, amount, weight in zip(texts, amounts, weights)
        ]
        return sum(steps[1:], steps[0]) / sum(weights[1:], weights[0])

    check(made, hand.run(start, step))


class Network(nn.Module):
    """A residual of hint and latent for the first block of the tiny UNet."""

    dtype = torch.float32

    def forward(self, x: Tensor, hint: Tensor, **_: Any) -> dict[str, list[Tensor | None]]:
        seen = torch.nn.functional.avg_pool2d(hint.mean(1, keepdim=True), 8)
        return {"input": [(seen + 0.1 * x.mean(1, keepdim=True)).expand(-1, 16, -1, -1)]}


@pytest.mark.parametrize("carrier", ["entry", "control net"])
@pytest.mark.parametrize("dim", [None, 0, 3])
def test_a_control_net_and_hooks_of_one_text_act_together_also_in_windows(
    models: Models, carrier: str, dim: int | None
) -> None:
    model, clip, lora = models
    shape = (FRAMES, 4, SIDE, SIDE) if dim == 0 else (1, 4, 12, 12)
    start, latent = start_of(*shape)
    hint = torch.rand(shape[0], shape[2] * 8, shape[3] * 8, 3)
    net = ControlNet(Network(), load_device=torch.device("cpu"))
    pair = pair_of(clip, "a red circle")
    hooks = hooks_of(lora, STRENGTH_A, SCHEDULE_A)
    controlled = ControlNetApplyAdvanced().apply_controlnet(*pair, net, hint, 0.7, 0.0, 0.6)
    if carrier == "entry":
        hooked = PairConditioningSetProperties().run(*controlled, 1.0, "default", hooks=hooks)
    else:
        net.extra_hooks = hooks
        hooked = ControlNetApplyAdvanced().apply_controlnet(*pair, net, hint, 0.7, 0.0, 0.6)
        net.extra_hooks = None
    view = model if dim is None else nodes_context_windows.windowed(
        model, "standard_static", "pyramid", False,
        context_length=4 if dim == 0 else 8, context_overlap=2, dim=dim,
    )  # fmt: skip
    made = sampled(view, hooked, start, latent, SIGMAS)
    hand = ByHand(models)
    to_sigma = model.model.model_sampling.percent_to_sigma

    def step(x: Tensor, sigmas: Tensor) -> Tensor:
        sigma = float(sigmas[0])
        amount = STRENGTH_A * hand.strength(SCHEDULE_A, sigma)
        if dim is None:
            windows = [list(range(1))]
        else:
            handler = view.model_options["context_handler"]
            found = handler.get_context_windows(model, x, {"transformer_options": {}})
            windows = [window.index_list for window in found]
        total, weight = torch.zeros_like(x), torch.zeros_like(x)
        for frames in windows:
            axis = dim or 0
            place = (*(slice(None),) * axis, frames)
            part = hint[frames] if axis == 0 else hint[:, :, frames[0] * 8 : frames[-1] * 8 + 8]
            texts: Any = pair
            if sigma >= to_sigma(0.6):
                texts = ControlNetApplyAdvanced().apply_controlnet(*pair, net, part, 0.7, 0.0, 1.0)
            weights = torch.tensor(window_schedules.pyramid_weights(len(frames)))
            shaped = weights.reshape(-1, *(1,) * (x.ndim - 1 - axis)).to(x)
            total[place] += hand.step(x[place], sigmas, texts, amount) * shaped
            weight[place] += shaped
        return total / weight

    check(made, hand.run(start, step))
    plain = sampled(view, pair, start, latent, SIGMAS)
    assert (made - plain).abs().max() > 1e-2 * made.std()


def test_a_range_gives_each_time_the_hooks_of_its_own(models: Models) -> None:
    model, clip, lora = models
    start, latent = start_of(1, 4, SIDE, SIDE)
    texts = [pair_of(clip, text) for text in ("a red circle", "a green box")]
    schedules = (hooks_of(lora, STRENGTH_A, SCHEDULE_A), hooks_of(lora, STRENGTH_B, SCHEDULE_B))
    _, before, _ = nodes_hooks.ConditioningTimestepsRange().run(0.5, 1.0)
    first = PairConditioningSetProperties().run(
        *texts[0], 1.0, "default", hooks=schedules[0], timesteps=before
    )
    pair = PairConditioningSetPropertiesAndCombine().run(
        *first, *texts[1], 1.0, "default", hooks=schedules[1], timesteps=(0.5, 1.0)
    )
    made = sampled(model, pair, start, latent, SIGMAS)
    hand = ByHand(models)
    to_sigma = model.model.model_sampling.percent_to_sigma

    def step(x: Tensor, sigmas: Tensor) -> Tensor:
        sigma = float(sigmas[0])
        late = sigma < to_sigma(0.5)
        schedule, strength = (SCHEDULE_B, STRENGTH_B) if late else (SCHEDULE_A, STRENGTH_A)
        return hand.step(x, sigmas, texts[late], strength * hand.strength(schedule, sigma))

    check(made, hand.run(start, step))
