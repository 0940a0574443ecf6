"""Schedules as curves between two levels, independent of a model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from comfy.sampling.noise_levels import flux_time_shift
from comfy.sampling.schedules import append_zero, check_logarithms

# Token counts for which the base and the maximum shift of a flow schedule are given.
BASE_TOKENS, MAX_TOKENS = 1024, 4096


def get_sigmas_polyexponential(
    n: int, sigma_min: float, sigma_max: float, rho: float = 1.0, device: Any = "cpu"
) -> Tensor:
    """A power rho of a straight line, in log sigma."""
    check_logarithms(sigma_min, sigma_max)
    ramp = torch.linspace(1, 0, n, device=device) ** rho
    low, high = math.log(sigma_min), math.log(sigma_max)
    return append_zero(torch.exp(ramp * (high - low) + low))


def get_sigmas_vp(
    n: int, beta_d: float = 19.9, beta_min: float = 0.1, eps_s: float = 1e-3, device: Any = "cpu"
) -> Tensor:
    """Uniform in the time of a continuous variance-preserving diffusion, from 1 to eps_s.

    Source: Song et al. 2020, https://arxiv.org/abs/2011.13456, appendix C.
    """
    time = torch.linspace(1, eps_s, n, device=device)
    sigmas = torch.sqrt(torch.special.expm1(beta_d * time**2 / 2 + beta_min * time))
    if not torch.isfinite(sigmas).all():
        raise ValueError(
            f"beta_d {beta_d:g} and beta_min {beta_min:g} give noise levels beyond all numbers; "
            "beta_d / 2 + beta_min must stay below 88"
        )
    return append_zero(sigmas)


def get_sigmas_laplace(
    n: int,
    sigma_min: float,
    sigma_max: float,
    mu: float = 0.0,
    beta: float = 0.5,
    device: Any = "cpu",
) -> Tensor:
    """Levels whose log-SNR follows a Laplace distribution, clipped to the two ends.

    Source: Hang et al. 2024, https://arxiv.org/abs/2407.03297.
    """
    place = torch.linspace(0, 1, n, device=device)
    offset = (0.5 - place).sign() * torch.log(1 - 2 * (0.5 - place).abs() + 1e-5)
    return torch.exp(mu - beta * offset).clamp(min=sigma_min, max=sigma_max)


def turbo_schedule(model_sampling: Any, steps: int, denoise: float) -> Tensor:
    """The timesteps distilled one-step models were trained on: 999, 899, ... 99.

    Raises:
        ValueError: They are no timesteps of the model.
    """
    first = 10 - int(10 * denoise)
    timesteps = (torch.arange(1, 11) * 100 - 1).flip(0)[first : first + steps]
    sigmas = append_zero(model_sampling.sigma(timesteps))
    if not (torch.isfinite(sigmas).all() and (sigmas.diff() <= 0).all()):
        raise ValueError(
            f"the timesteps {timesteps.tolist()} of SD Turbo give this model the levels "
            f"{[round(level, 3) for level in sigmas.tolist()]}, which are none to sample with: "
            "use another scheduler with it"
        )
    return sigmas


def shift_for_tokens(
    tokens: float, base_shift: float, max_shift: float, base_tokens: int = BASE_TOKENS
) -> float:
    """Shift of a flow schedule, linear in the number of latent tokens."""
    slope = (max_shift - base_shift) / (MAX_TOKENS - base_tokens)
    return tokens * slope + base_shift - slope * base_tokens


def _flow_levels(steps: int, mu: float) -> Tensor:
    """Uniform flow times from 1 to 0 after an exponential shift."""
    time = torch.linspace(1.0, 0.0, steps + 1)
    return torch.where(time > 0, flux_time_shift(mu, 1.0, time), torch.zeros_like(time))


def ltxv_schedule(
    steps: int, tokens: int, max_shift: float, base_shift: float, stretch: bool, terminal: float
) -> Tensor:
    """Shifted flow times, stretched so that the last level before zero is `terminal`."""
    levels = _flow_levels(steps, shift_for_tokens(tokens, base_shift, max_shift))
    if stretch:
        signal = 1.0 - levels[:-1]
        if signal[-1] == 0:  # shifted so far that every level is pure noise
            return levels
        # Divided twice, as pictures were made: what the last digit of a level near 1 leaves for
        # the signal is a digit of the picture.
        levels[:-1] = 1.0 - signal / (signal[-1] / (1.0 - terminal))
    return levels


def flux2_shift(tokens: int, steps: int) -> float:
    """Shift of FLUX.2's schedule, fitted by its authors to token count and step count."""
    many = 0.00016927 * tokens + 0.45666666  # at 200 steps
    if tokens > 4300:
        return many
    few = 8.73809524e-05 * tokens + 1.89833333  # at 10 steps
    slope = (many - few) / 190.0
    return slope * steps + many - 200.0 * slope


def flux2_schedule(steps: int, width: int, height: int) -> Tensor:
    """FLUX.2's schedule for a picture of width x height pixels."""
    return _flow_levels(steps, flux2_shift(round(width * height / 256), steps))
