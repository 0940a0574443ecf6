"""Second-order one-step solvers on the probability-flow ODE."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from comfy.sampling.noise import NoiseSampler
from comfy.sampling.parameterisation import EXPLODING
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory, churn, towards


@torch.no_grad()
def sample_heun(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    s_churn: float = 0.0,
    s_tmin: float = 0.0,
    s_tmax: float = math.inf,
    s_noise: float = 1.0,
) -> Tensor:
    """Heun's method: an Euler step, then the average of the slopes at both ends.

    Source: Karras et al. 2022, https://arxiv.org/abs/2206.00364, algorithm 2.
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable)
    for sigma, sigma_next in run:
        x, sigma_hat = churn(x, sigma, run.steps, s_churn, s_tmin, s_tmax, s_noise)
        step = sigma_next - sigma_hat
        slope = run.slope(x, sigma_hat)
        if sigma_next > 0:  # the slope at zero is undefined: the last step stays first order
            slope = (slope + run.slope(x + slope * step, sigma_next, report=False)) / 2
        x = x + slope * step
    return x


@torch.no_grad()
def sample_heunpp2(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    s_churn: float = 0.0,
    s_tmin: float = 0.0,
    s_tmax: float = math.inf,
    s_noise: float = 1.0,
) -> Tensor:
    """Heun++: slopes at up to three levels ahead, weighted by the levels.

    Towards the end, where fewer levels lie ahead, it falls back to two slopes and then to one.
    There is no paper: the weights are those of the community sampler of this name.
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable)
    last, table = run.levels[-1], run.sigmas.cpu()
    halves, thirds = table / (2 * table[0]), table / (3 * table[0])
    for sigma, sigma_next in run:
        x, sigma_hat = churn(x, sigma, run.steps, s_churn, s_tmin, s_tmax, s_noise)
        step = sigma_next - sigma_hat
        slope = run.slope(x, sigma_hat)
        if sigma_next != last:
            sigma_after = run.levels[run.index + 2]
            ahead = x + slope * step
            slope_2 = run.slope(ahead, sigma_next, report=False)
            if sigma_after == last:  # two slopes
                weight_2 = halves[run.index + 1]
                slope = slope * (1 - weight_2) + slope_2 * weight_2
            else:  # three slopes
                ahead = ahead + slope_2 * (sigma_after - sigma_next)
                slope_3 = run.slope(ahead, sigma_after, report=False)
                weight_2, weight_3 = thirds[run.index + 1 : run.index + 3]
                slope = slope * (1 - weight_2 - weight_3) + slope_2 * weight_2 + slope_3 * weight_3
        x = x + slope * step
    return x


def _middle(sigma: float, sigma_next: float) -> float:
    """Level halfway between two in log sigma.

    In single precision, as pictures were made: far above the latent's own size a digit of this
    level is a digit of the picture.
    """
    start, end = torch.tensor([sigma, sigma_next], dtype=torch.float32).log()
    return torch.lerp(start, end, 0.5).exp().item()


@torch.no_grad()
def sample_dpm_2(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    s_churn: float = 0.0,
    s_tmin: float = 0.0,
    s_tmax: float = math.inf,
    s_noise: float = 1.0,
) -> Tensor:
    """Midpoint steps, the midpoint taken in log sigma.

    Source: Karras et al. 2022, algorithm 2; Lu et al. 2022, https://arxiv.org/abs/2206.00927.
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable)
    for sigma, sigma_next in run:
        x, sigma_hat = churn(x, sigma, run.steps, s_churn, s_tmin, s_tmax, s_noise)
        slope = run.slope(x, sigma_hat)
        if sigma_next > 0:
            sigma_mid = _middle(sigma_hat, sigma_next)
            slope = run.slope(x + slope * (sigma_mid - sigma_hat), sigma_mid, report=False)
        x = x + slope * (sigma_next - sigma_hat)
    return x


@torch.no_grad()
def sample_dpm_2_ancestral(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    eta: float = 1.0,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
) -> Tensor:
    """Midpoint steps below the next level, then fresh noise up to it.

    A step that keeps none of the old noise adds fresh noise in flow models only, as
    `sample_euler_ancestral` does.
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable)
    run.use_noise(x, noise_sampler)
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        sigma_down, scale, sigma_up = run.path.ancestral_step(sigma, sigma_next, eta)
        if sigma_next == 0 or (sigma_down == 0 and run.path is EXPLODING):
            x = towards(denoised, x, sigma, 0.0)
            continue
        if sigma_down <= 0:  # so high an eta that no old noise is kept
            x = denoised * run.path.alpha(sigma_next)
            x = x + run.draw(sigma, sigma_next) * (s_noise * sigma_next)
            continue
        slope, sigma_mid = (x - denoised) / sigma, _middle(sigma, sigma_down)
        slope = run.slope(x + slope * (sigma_mid - sigma), sigma_mid, report=False)
        x = (x + slope * (sigma_down - sigma)) * scale
        x = x + run.draw(sigma, sigma_next) * (s_noise * sigma_up)
    return x
