"""The same estimates whatever memory allows, and nested latents as if each part ran alone."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy import conds
from comfy.nested_tensor import NestedTensor
from comfy.sampling import batching, conditioning, run, samplers
from tests.comfy.sampling.conditioning_oracle import Lists
from tests.comfy.sampling.support import CPU, TestModel, context, patcher
from tests.comfy.sampling.test_random_conditioning import (
    SIGMAS,
    PlacesModel,
    graph_form,
    random_entry,
)


class MeasuredModel(PlacesModel):
    """Takes a byte for each number, and notes how many a call took."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []

    def memory_required(self, input_shape: Any, cond_shapes: Any = None) -> float:
        texts = sum(math.prod(shape) for shape in (cond_shapes or {}).get("c_crossattn", ()))
        return float(math.prod(input_shape) + texts)

    def apply_model(self, x: Tensor, t: Tensor, c_crossattn: Tensor, **kw: Any) -> Tensor:
        self.taken.append(x.numel())
        return super().apply_model(x, t, c_crossattn, **kw)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_smaller_budget_makes_smaller_calls_and_the_same_estimates(
    axes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [0, 0, 0]
    for seed in range(25):
        r = random.Random(1000 + seed)
        batch, dims = r.randint(1, 3), [r.randint(2, 16 if axes < 3 else 7) for _ in range(axes)]
        names = ("positive", "negative")
        lists: Lists = {
            name: [random_entry(r, dims, batch) for _ in range(r.randint(1, 5))] for name in names
        }
        x = torch.randn(batch, 4, *dims, generator=torch.Generator().manual_seed(seed))
        sigma = torch.full((batch,), r.choice(SIGMAS))
        found = []
        for place, budget in enumerate((1 << 40, 3 * x.numel(), 0)):
            monkeypatch.setattr(batching.memory, "recent_free_memory", lambda _, b=budget: b)
            model = MeasuredModel()
            ready = {name: conditioning.convert_cond(graph_form(lists[name])) for name in names}
            ready = conditioning.process_conds(model, x, ready, CPU)
            found.append(batching.calc_cond_batch(model, list(ready.values()), x, sigma, {}))
            calls[place] += len(model.taken)
            for taken in model.taken:
                assert taken <= x.numel() or taken * batching.MEMORY_MARGIN < budget
        first, *others = found
        for other in others:
            for one, two in zip(first, other):
                torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)
    assert calls[0] < calls[1] < calls[2]


class LeaningModel(TestModel):
    """Each number by itself, so that parts of a latent do not see each other."""

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        return {"c_crossattn": conds.CONDCrossAttn(kwargs["cross_attn"])}

    def apply_model(self, x: Tensor, t: Tensor, c_crossattn: Tensor, **kw: Any) -> Tensor:
        return x * 0.25 + c_crossattn.mean() + torch.tanh(x) * 0.1


VIDEO, SOUND = (2, 4, 3, 4, 5), (2, 8, 16)
MASKS: dict[str, list[tuple[int, ...]]] = {
    "none": [],
    "of both": [(2, 3, 4, 5), (2, 1, 16)],
    "of the video alone, one for its frames": [(1, 8, 10)],
    "of pictures twice the size": [(1, 3, 8, 10), (1, 1, 7)],
}


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m", "heun", "lcm"])
@pytest.mark.parametrize("masked", MASKS)
def test_a_latent_of_video_and_sound_is_sampled_as_each_alone(masked: str, sampler: str) -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(shape, generator=generator) for shape in (VIDEO, SOUND)]
    noises = [torch.randn(shape, generator=generator) for shape in (VIDEO, SOUND)]
    masks: list[Any] = [torch.rand(shape, generator=generator) for shape in MASKS[masked]]
    sigmas = torch.tensor([10.0, 3.0, 1.0, 0.0])
    if sampler == "lcm":  # its fresh noise is drawn for both parts together
        sigmas = torch.tensor([10.0, 0.0])
    positive, negative = ([[context([value] * 4), {}]] for value in (0.3, -0.2))

    def sampled(noise: Any, latent: Any, mask: Any) -> Any:
        return run.sample_custom(
            patcher(LeaningModel()), noise, 2.0, samplers.ksampler(sampler), sigmas,
            positive, negative, latent, noise_mask=mask, disable_pbar=True, seed=1,
        )  # fmt: skip

    mask: Any = None
    if masks:
        mask = NestedTensor(masks) if len(masks) > 1 else masks[0]
    made = sampled(NestedTensor(noises), NestedTensor(parts), mask).unbind()
    masks += [None] * (2 - len(masks))
    for one, noise, latent, own in zip(made, noises, parts, masks):
        torch.testing.assert_close(one, sampled(noise, latent, own), rtol=1e-5, atol=1e-5)
