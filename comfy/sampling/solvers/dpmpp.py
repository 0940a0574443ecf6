"""DPM-Solver++ without noise in between: exponential integrators on the clean estimate.

In half-log-SNR lambda the step is exact for a constant estimate D:
x(t) = sigma_t / sigma_s * x - alpha_t * expm1(-h) * D with h = lambda_t - lambda_s. Written for
variance-exploding levels, as users' pictures with flow models were made too.
Source: Lu et al. 2022, https://arxiv.org/abs/2211.01095.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from comfy.sampling.noise import NoiseSampler
from comfy.sampling.parameterisation import split_ancestral
from comfy.sampling.solvers.cfg_pp import UnconditionalCapture
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory

# Level used for the midpoint of a first step that starts from pure noise, where its half-log-SNR is
# -infinity.
NEARLY_PURE_NOISE = 0.9999


@torch.no_grad()
def sample_dpmpp_2m(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
) -> Tensor:
    """DPM-Solver++(2M): the estimate is extrapolated from the last two (algorithm 2)."""
    run = Trajectory(model, sigmas, extra_args, callback, disable, distinct=True)
    previous: Tensor | None = None
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        estimate = denoised
        if previous is not None and sigma_next > 0:
            last_step = math.log(run.levels[run.index - 1] / sigma)
            gain = math.log(sigma / sigma_next) / (2 * last_step)
            estimate = denoised * (1 + gain) - previous * gain
        ratio = sigma_next / sigma
        x = x * ratio + estimate * (1 - ratio)
        previous = denoised
    return x


@torch.no_grad()
def sample_dpmpp_2m_cfg_pp(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
) -> Tensor:
    """DPM-Solver++(2M) with CFG++: noise is measured from the unconditional estimate."""
    capture = UnconditionalCapture(extra_args)
    run = Trajectory(model, sigmas, capture.extra_args, callback, disable, distinct=True)
    previous: Tensor | None = None
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        unconditional, ratio = capture.denoised, sigma_next / sigma
        correction = unconditional * -ratio
        if previous is not None and sigma_next > 0:
            last_step = math.log(run.levels[run.index - 1] / sigma)
            gain = math.log(sigma / sigma_next) / (2 * last_step)
            correction = correction + (denoised - previous) * ((1 - ratio) * gain)
        x = denoised + correction + x * ratio
        previous = unconditional
    return x


@torch.no_grad()
def sample_dpmpp_2s_ancestral(
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
    """DPM-Solver++(2S) below the next level, then fresh noise (algorithm 1, r = 1/2)."""
    run = Trajectory(model, sigmas, extra_args, callback, disable)
    run.use_noise(x, noise_sampler)
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        sigma_down, scale, sigma_up = run.path.ancestral_step(sigma, sigma_next, eta)
        if sigma_down <= 0:  # the last step, or an eta so high that no old noise is kept
            x = denoised * run.path.alpha(sigma_next)
            sigma_up = sigma_next
        else:
            sigma_mid = _middle(run, sigma, sigma_down)
            ratio = sigma_mid / sigma
            middle = run.denoise(x * ratio + denoised * (1 - ratio), sigma_mid, report=False)
            ratio = sigma_down / sigma
            x = (x * ratio + middle * (1 - ratio)) * scale
        if sigma_next > 0 and eta > 0:
            x = x + run.draw(sigma, sigma_next) * (s_noise * sigma_up)
    return x


def _middle(run: Trajectory, sigma: float, sigma_down: float) -> float:
    """Level halfway between two in half-log-SNR."""
    start = run.path.half_log_snr(sigma)
    if start == -math.inf:
        return NEARLY_PURE_NOISE
    return run.path.sigma_at((start + run.path.half_log_snr(sigma_down)) / 2)


@torch.no_grad()
def sample_dpmpp_2s_ancestral_cfg_pp(
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
    """DPM-Solver++(2S) with CFG++ and fresh noise; levels are taken as variance exploding."""
    capture = UnconditionalCapture(extra_args)
    run = Trajectory(model, sigmas, capture.extra_args, callback, disable)
    run.use_noise(x, noise_sampler)
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        sigma_down, sigma_up = split_ancestral(sigma, sigma_next, eta)
        if sigma_down == 0:
            x = denoised
        else:
            sigma_mid = math.sqrt(sigma * sigma_down)
            ratio = sigma_mid / sigma
            shifted = x + (denoised - capture.denoised)
            middle = run.denoise(shifted * ratio + denoised * (1 - ratio), sigma_mid, report=False)
            ratio = sigma_down / sigma
            # The unconditional estimate is now that at sigma_mid.
            x = (x + (denoised - capture.denoised)) * ratio + middle * (1 - ratio)
        if sigma_next > 0:
            x = x + run.draw(sigma, sigma_next) * (s_noise * sigma_up)
    return x
