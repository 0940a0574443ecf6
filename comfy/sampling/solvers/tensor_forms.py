"""Small formulas of the solvers for callers that hold levels as tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy.sampling.parameterisation import CONST, split_ancestral
from comfy.sampling.solvers.trajectory import FINITE_SNR_PERCENT


def append_dims(x: Tensor, target_dims: int) -> Tensor:
    """View of x with trailing axes of length 1 up to a number of axes."""
    missing = target_dims - x.ndim
    if missing < 0:
        raise ValueError(f"a tensor of {x.ndim} axes cannot be viewed with {target_dims}")
    return x[(...,) + (None,) * missing]


def to_d(x: Tensor, sigma: Tensor, denoised: Tensor) -> Tensor:
    """Slope dx / dsigma of the probability-flow ODE; sigma is a number or [B]."""
    return (x - denoised) / append_dims(sigma, x.ndim)


def get_ancestral_step(sigma_from: Any, sigma_to: Any, eta: float = 1.0) -> tuple[Any, Any]:
    """(sigma_down, sigma_up) of an ancestral step; tensors where tensors were given."""
    if not eta:
        return sigma_to, sigma_to * 0
    if not torch.is_tensor(sigma_from) and not torch.is_tensor(sigma_to):
        return split_ancestral(float(sigma_from), float(sigma_to), eta)
    target = torch.as_tensor(sigma_to)
    variance = target**2 * (1 - (target / sigma_from) ** 2)
    sigma_up = torch.minimum(target, eta * variance.clamp(min=0).sqrt())
    return (target**2 - sigma_up**2).clamp(min=0).sqrt(), sigma_up


def ei_h_phi_1(h: Tensor) -> Tensor:
    """h * phi_1(h) = e^h - 1, the weight of a constant in exponential integrators."""
    return h.expm1()


def ei_h_phi_2(h: Tensor) -> Tensor:
    """h * phi_2(h) = (e^h - 1 - h) / h, that of a slope."""
    return (h.expm1() - h) / h


def sigma_to_half_log_snr(sigma: Tensor, model_sampling: Any) -> Tensor:
    """lambda = log(alpha / sigma) of levels of a model."""
    if isinstance(model_sampling, CONST):
        return sigma.logit().neg()
    return sigma.log().neg()


def half_log_snr_to_sigma(half_log_snr: Tensor, model_sampling: Any) -> Tensor:
    """Levels of a model at half-log-SNRs."""
    if isinstance(model_sampling, CONST):
        return half_log_snr.neg().sigmoid()
    return half_log_snr.neg().exp()


def offset_first_sigma_for_snr(
    sigmas: Tensor, model_sampling: Any, percent_offset: float = FINITE_SNR_PERCENT
) -> Tensor:
    """Levels whose first has a finite half-log-SNR."""
    is_flow = isinstance(model_sampling, CONST)
    if len(sigmas) <= 1 or not is_flow or sigmas[0] < 1:
        return sigmas
    sigmas = sigmas.clone()
    sigmas[0] = model_sampling.percent_to_sigma(percent_offset)
    return sigmas
