"""Masked runs of random shapes and levels, plain and with a mask that counts as time, against the
same steps taken in float64."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import noise, run, samplers
from comfy.sampling.parameterisation import CONST
from comfy_extras.nodes_differential_diffusion import DifferentialDiffusion
from tests.comfy.sampling.support import (
    NEGATIVE,
    POSITIVE,
    ClosedFormModel,
    conditioning,
    patcher,
    two_gaussians,
)

MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}
KINDS = ("eps_sd15", "vpred_sd15", "sd3_shift3", "edm_default", "wan_shift8")


def random_mask(r: random.Random, dims: list[int], batch: int) -> tuple[Tensor, Tensor]:
    """A mask as nodes give it, and as it lies over the latent [B or 1, 1, ...]."""
    axes = len(dims)
    size = [r.randint(1, 4 * dim) for dim in dims]
    if axes == 3:  # frames, for all videos of the batch
        given = torch.rand(r.choice([1, dims[0]]), *size[1:])
        frames = given[None, None]
    else:
        given = torch.rand(r.choice([1, batch]), *([1] if axes == 1 else []), *size)
        frames = given.reshape(len(given), 1, *size)
    mask = torch.nn.functional.interpolate(frames, size=dims, mode=MODES[axes])
    return given, mask.double()


def expected_run(
    sampling: Any,
    start: Tensor,
    latent: Tensor,
    levels: list[float],
    mask: Tensor,
    strength: float | None,
    cfg: float,
) -> Tensor:
    """Euler steps; `strength` of a mask that counts as time, or None for a plain one."""
    flow, axes = isinstance(sampling, CONST), latent.ndim - 2
    centres = [
        torch.tensor(c, dtype=torch.float64).reshape(1, 4, *[1] * axes)
        for c in (POSITIVE, NEGATIVE)
    ]

    def noisy(sigma: float) -> Tensor:
        return sigma * start + (1 - sigma if flow else 1) * latent

    def time(sigma: float) -> float:
        return float(sampling.timestep(torch.tensor(sigma)))

    last = time(max(levels[-1], float(sampling.sigma_min)))
    x = noisy(levels[0])
    for sigma, following in pairwise(levels):
        change = mask
        if strength is not None:
            to_come = (time(sigma) - last) / (time(levels[0]) - last)
            change = strength * (mask >= to_come) + (1 - strength) * mask
        inner = x * change + noisy(sigma) * (1 - change)
        positive, negative = (
            two_gaussians(inner, torch.tensor(sigma, dtype=torch.float64), centre, flow)
            for centre in centres
        )
        denoised = negative + (positive - negative) * cfg
        denoised = denoised * change + latent * (1 - change)
        x = x + (x - denoised) / sigma * (following - sigma)
    return x / (1 - levels[-1]) if flow else x


@pytest.mark.parametrize("kind", KINDS)
def test_masked_steps_are_those_of_the_formula(kind: str, kind_settings: dict[str, Any]) -> None:
    row = kind_settings[kind]
    for seed in range(24):
        r = random.Random(seed)
        torch.manual_seed(seed)
        axes, batch = r.randint(1, 3), r.randint(1, 3)
        dims = [r.randint(2, 6) for _ in range(axes)]
        model = ClosedFormModel(row["sampling_type"], row["sampling_settings"])
        sampling, view = model.model_sampling, patcher(model)
        strength = r.choice([None, 1.0, 0.5])
        if strength is not None:
            (view,) = DifferentialDiffusion.execute(view, strength)
        latent = torch.randn(batch, 4, *dims)
        given, mask = random_mask(r, dims, batch)
        mask = mask[[item % len(mask) for item in range(batch)]].expand(latent.shape)
        top, steps = 0.9 * min(float(sampling.sigma_max), 5.0), r.randint(1, 5)
        levels = [top * (1 - step / steps) ** 2 for step in range(steps)] + [0.0]
        levels = levels[: r.choice([len(levels), max(2, len(levels) - 1)])]
        drawn = r.randrange(2**64)
        start, cfg = noise.prepare_noise(latent, drawn), r.choice([1.0, 3.0])
        made = run.sample_custom(
            view, start, cfg, samplers.ksampler("euler"), torch.tensor(levels),
            conditioning(POSITIVE), conditioning(NEGATIVE), latent, noise_mask=given,
            disable_pbar=True, seed=drawn,
        )  # fmt: skip
        expected = expected_run(
            sampling, start.double(), latent.double(), torch.tensor(levels).tolist(), mask,
            strength, cfg,
        )  # fmt: skip
        assert (made - expected).abs().max() < 1e-4 * (1 + expected.abs().max()), seed
