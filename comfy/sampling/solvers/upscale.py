"""Consistency sampling at a growing resolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from comfy import resize
from comfy.sampling.solvers.cfg_pp import UnconditionalCapture
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory


@torch.no_grad()
def sample_lcm_upscale(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    total_upscale: float = 2.0,
    upscale_method: str = "bislerp",
    upscale_steps: int | None = None,
) -> Tensor:
    """LCM whose clean estimate is enlarged after each of the first steps.

    Noise comes from the global generator.

    Args:
        total_upscale: Final over first width and height.
        upscale_method: A method of `resize.common_upscale`.
        upscale_steps: Steps over which the size grows; None means the first half.
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable)
    count = len(sigmas)
    growing = max(count // 2 + 1, 2) if upscale_steps is None else min(upscale_steps, count) + 1
    factors = np.linspace(1.0, total_upscale, growing)[1:].tolist()
    height, width = x.shape[-2:]
    for _, sigma_next in run:
        x = run.denoise(x, run.levels[run.index])
        if run.index < len(factors):
            factor = factors[run.index]
            x = resize.common_upscale(
                x, round(width * factor), round(height * factor), upscale_method, "disabled"
            )
        if sigma_next > 0:
            x = x + torch.randn_like(x) * sigma_next
    return x


@torch.no_grad()
def sample_euler_pp(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
) -> Tensor:
    """Euler with the earlier form of CFG++: the slope is measured at a shifted latent."""
    capture = UnconditionalCapture(extra_args)
    run = Trajectory(model, sigmas, capture.extra_args, callback, disable)
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        slope = (x - denoised + capture.denoised - denoised) / sigma
        x = x + slope * (sigma_next - sigma)
    return x
