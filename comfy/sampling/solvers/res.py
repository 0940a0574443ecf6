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
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory, towards


def _weights(times: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[float, float, float]:
    """(length h, weights of the newest and the previous estimate) of a step.

    Args:
        times: -log of the step's level, of the one it goes down to, and of both in the last step.
    """
    time, time_next, last, last_next = times
    h = time_next - time
    if h == 0 or last == last_next:  # no step to be told from none, or no place to extrapolate from
        return float(h), 0.0, 0.0
    place = float((last - last_next) / h)  # of the previous estimate, in steps
    phi_1 = torch.expm1(-h) / -h
    phi_2 = (phi_1 - 1) / -h
    second = phi_2 / place
    return float(h), float(phi_1 - second), float(second)


def _multistep(
    run: Trajectory, x: Tensor, eta: float, s_noise: float, capture: UnconditionalCapture | None
) -> Tensor:
    """Steps whose weights are computed in the precision of the levels, as pictures were made."""
    previous: Tensor | None = None
    last = (torch.zeros(()), torch.zeros(()))

    def time(level: float) -> Tensor:
        return -torch.tensor(level, dtype=run.sigmas.dtype).log()

    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        if sigma == sigma_next:  # no step, but a draw, as users' seeds expect
            if eta > 0:
                run.draw(sigma, sigma_next)
            continue
        origin = denoised if capture is None else capture.denoised
        sigma_down, sigma_up = split_ancestral(sigma, sigma_next, eta)
        now = (time(sigma), time(sigma_down))
        if sigma_down == 0 or previous is None:
            if capture is None:
                x = towards(denoised, x, sigma, sigma_down)
            else:
                x = denoised + (x - origin) / sigma * sigma_down
        else:
            h, first, second = _weights((*now, *last))
            if capture is not None:
                x = x + (denoised - origin)
            x = x * math.exp(-h) + (origin * first + previous * second) * h
        if sigma_next > 0 and eta > 0:
            x = x + run.draw(sigma, sigma_next) * (s_noise * sigma_up)
        previous, last = origin, now
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
    run = Trajectory(model, sigmas, extra_args, callback, disable)
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
    run = Trajectory(model, sigmas, capture.extra_args, callback, disable)
    run.use_noise(x, noise_sampler)
    return _multistep(run, x, eta, s_noise, capture)
