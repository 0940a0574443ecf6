"""Schedules as curves between two levels, independent of a model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from comfy.sampling.schedules import append_zero


def get_sigmas_polyexponential(
    n: int, sigma_min: float, sigma_max: float, rho: float = 1.0, device: Any = "cpu"
) -> Tensor:
    """A power rho of a straight line, in log sigma."""
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
    return append_zero(torch.sqrt(torch.special.expm1(beta_d * time**2 / 2 + beta_min * time)))


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
