"""Refined exponential solvers: second-order multistep in half-log-SNR.

Source: Zhang et al. 2023, https://arxiv.org/abs/2308.02157, algorithm 2, on variance-exploding
levels, with fresh noise in the ancestral variants.
"""
# ruff: noqa: ARG001

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from comfy.sampling.noise import NoiseSampler
from comfy.sampling.parameterisation import split_ancestral
from comfy.sampling.solvers.cfg_pp import UnconditionalCapture
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory


def phi_1(z: float) -> float:
    """(e^z - 1) / z, 1 at zero."""
    return math.expm1(z) / z if z else 1.0


def phi_2(z: float) -> float:
    """(phi_1(z) - 1) / z, 1/2 at zero."""
    return (phi_1(z) - 1.0) / z if z else 0.5


def _multistep(
    run: Trajectory, x: Tensor, eta: float, s_noise: float, capture: UnconditionalCapture | None
) -> Tensor:
    previous: Tensor | None = None
    last_down = 0.0
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        origin = denoised if capture is None else capture.denoised
        sigma_down, sigma_up = split_ancestral(sigma, sigma_next, eta)
        if sigma_down == 0 or previous is None:
            x = denoised + (x - origin) * (sigma_down / sigma)
        else:
            h = math.log(sigma / sigma_down)
            # Where the previous estimate lies, in steps; nothing to extrapolate if it lies here,
            # nor from a clean level, which is infinitely far away.
            far = math.log(last_down / run.levels[run.index - 1]) if last_down > 0 else -math.inf
            place = far / h
            second = phi_2(-h) / place if place else 0.0
            first = phi_1(-h) - second if place else 0.0
            if capture is not None:
                x = x + (denoised - origin)
            x = x * math.exp(-h) + origin * (h * first) + previous * (h * second)
        if sigma_next > 0 and eta > 0:
            x = x + run.draw(sigma, sigma_next) * (s_noise * sigma_up)
        previous, last_down = origin, sigma_down
    return x


@torch.no_grad()
def sample_res_multistep(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
) -> Tensor:
    """Deterministic refined exponential multistep."""
    run = Trajectory(model, sigmas, extra_args, callback, disable, distinct=True)
    return _multistep(run, x, 0.0, s_noise, None)


@torch.no_grad()
def sample_res_multistep_cfg_pp(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
) -> Tensor:
    """Refined exponential multistep with CFG++."""
    capture = UnconditionalCapture(extra_args)
    run = Trajectory(model, sigmas, capture.extra_args, callback, disable, distinct=True)
    return _multistep(run, x, 0.0, s_noise, capture)


@torch.no_grad()
def sample_res_multistep_ancestral(
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
    """Refined exponential multistep below the next level, then fresh noise."""
    run = Trajectory(model, sigmas, extra_args, callback, disable, distinct=True)
    run.use_noise(x, noise_sampler)
    return _multistep(run, x, eta, s_noise, None)


@torch.no_grad()
def sample_res_multistep_ancestral_cfg_pp(
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
    """Refined exponential multistep with CFG++ and fresh noise."""
    capture = UnconditionalCapture(extra_args)
    run = Trajectory(model, sigmas, capture.extra_args, callback, disable, distinct=True)
    run.use_noise(x, noise_sampler)
    return _multistep(run, x, eta, s_noise, capture)
