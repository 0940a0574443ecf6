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

from comfy.devices import formulas
from comfy.sampling.noise import NoiseSampler
from comfy.sampling.parameterisation import EXPLODING, split_ancestral
from comfy.sampling.solvers.cfg_pp import UnconditionalCapture
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory, towards

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
        if sigma_next == 0 or (sigma_down == 0 and run.path is EXPLODING):
            x = towards(denoised, x, sigma, 0.0)
        elif sigma_down <= 0:  # an eta so high that no old noise is kept
            x = denoised * run.path.alpha(sigma_next)
            sigma_up = sigma_next
        else:
            sigma_mid, half, whole = _halved_step(run, sigma, sigma_down)
            middle = run.denoise(x * half[0] + denoised * half[1], sigma_mid, report=False)
            x = (x * whole[0] + middle * whole[1]) * scale
        if sigma_next > 0 and eta > 0:
            x = x + run.draw(sigma, sigma_next) * (s_noise * sigma_up)
    return x


def _halved_step(
    run: Trajectory, sigma: float, sigma_down: float
) -> tuple[float, list[float], list[float]]:
    """Level halfway between two in half-log-SNR; weights of x and of the estimate in the steps to
    it and to the lower level. In the precision of the levels, as pictures were made."""
    if run.path is EXPLODING:
        return _halved_exploding_step(run, sigma, sigma_down)
    ends = torch.tensor([sigma, sigma_down], dtype=run.sigmas.dtype)
    middle = ends.new_tensor(NEARLY_PURE_NOISE)
    if sigma < 1:
        start, end = ((1 - ends) / ends).log()
        middle = 1 / ((start + (end - start) / 2).exp() + 1)
    ratios = torch.stack([middle, ends[1]]) / ends[0]
    half, whole = torch.stack([ratios, 1 - ratios], dim=1).tolist()
    return middle.item(), half, whole


def _halved_exploding_step(
    run: Trajectory, sigma: float, sigma_down: float
) -> tuple[float, list[float], list[float]]:
    """As `_halved_step`, of variance-exploding levels: far above the latent's own size a digit of
    these factors is a digit of the picture."""
    start, end = -torch.tensor([sigma, sigma_down], dtype=run.sigmas.dtype).log()
    lengths = torch.stack([(end - start) / 2, end - start])
    ends = (-torch.stack([start + lengths[0], end])).exp()
    half, whole = torch.stack([ends / (-start).exp(), -(-lengths).expm1()], dim=1).tolist()
    return ends[0].item(), half, whole


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
    """DPM-Solver++(2S) with CFG++ and fresh noise; levels are taken as variance exploding.

    Pictures have been made with the unconditional estimate at the middle of the step in place of
    that at its start, which leaves the step no order.
    """
    capture = UnconditionalCapture(extra_args)
    run = Trajectory(model, sigmas, capture.extra_args, callback, disable)
    run.use_noise(x, noise_sampler)
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        sigma_down, sigma_up = split_ancestral(sigma, sigma_next, eta)
        if sigma_down == 0:
            x = denoised
        else:
            sigma_mid, half, whole = _halved_exploding_step(run, sigma, sigma_down)
            shifted = x + (denoised - capture.denoised)
            middle = run.denoise(shifted * half[0] + denoised * half[1], sigma_mid, report=False)
            if not formulas.as_published():
                shifted = x + (denoised - capture.denoised)  # now that at sigma_mid
            x = shifted * whole[0] + middle * whole[1]
        if sigma_next > 0:
            x = x + run.draw(sigma, sigma_next) * (s_noise * sigma_up)
    return x
