"""Gaussian data, for which the trajectory is known in closed form, behind networks of each kind.

For data N(c, s^2) the clean estimate is affine in x, and the ODE keeps (x - alpha c) / sqrt(alpha^2
s^2 + sigma^2). A network of a kind puts out what its paper defines; the sampling object of that
kind turns it back into the estimate, so a wrong conversion shows as a wrong end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from comfy.sampling import noise_levels
from comfy.sampling.parameterisation import FLOW, NoisePath

CENTRE, SPREAD = 0.7, 0.5
EDM_SIGMA_DATA = 0.5


def exact_estimate(x: Tensor, sigma: Tensor, path: NoisePath) -> Tensor:
    level = sigma.reshape(-1, *(1,) * (x.ndim - 1))
    alpha = 1 - level if path is FLOW else torch.ones_like(level)
    gain = alpha * SPREAD**2 / (alpha**2 * SPREAD**2 + level**2)
    return CENTRE + gain * (x - alpha * CENTRE)


def exact_end(x: Tensor, start: float, end: float, path: NoisePath) -> Tensor:
    def spread(sigma: float) -> float:
        return math.sqrt((path.alpha(sigma) * SPREAD) ** 2 + sigma**2)

    centred = (x - path.alpha(start) * CENTRE) * (spread(end) / spread(start))
    return path.alpha(end) * CENTRE + centred


def _noise(x: Tensor, x0: Tensor, sigma: Tensor) -> Tensor:
    return (x - x0) / sigma


def _velocity(x: Tensor, x0: Tensor, sigma: Tensor) -> Tensor:
    return (_noise(x, x0, sigma) - sigma * x0) / (1 + sigma**2).sqrt()


def _preconditioned(x: Tensor, x0: Tensor, sigma: Tensor) -> Tensor:
    total = sigma**2 + EDM_SIGMA_DATA**2
    return (x0 - x * EDM_SIGMA_DATA**2 / total) * total.sqrt() / (sigma * EDM_SIGMA_DATA)


def _flow(x: Tensor, x0: Tensor, sigma: Tensor) -> Tensor:
    return (x - (1 - sigma) * x0) / sigma - x0


NETWORKS: dict[str, tuple[str, dict[str, Any], Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "eps": ("EPS", {}, _noise),
    "v": ("V_PREDICTION", {}, _velocity),
    "edm": ("EDM", {"sigma_data": EDM_SIGMA_DATA}, _preconditioned),
    "flow": ("FLOW", {"shift": 3.0}, _flow),
}
"""Kind -> sampling kind, its settings, what the network puts out for (x, estimate, sigma)."""


class GaussianDenoiser:
    """A denoiser with the `inner_model` chain solvers look at; positive and negative agree."""

    def __init__(self, kind: str) -> None:
        name, settings, self.network = NETWORKS[kind]
        config = SimpleNamespace(sampling_settings=settings)
        self.sampling = noise_levels.build_model_sampling(name, config)
        self.path: NoisePath = self.sampling.path
        self.inner_model = SimpleNamespace(
            inner_model=SimpleNamespace(model_sampling=self.sampling)
        )

    def __call__(self, x: Tensor, sigma: Tensor, model_options: Any = None, **kw: Any) -> Tensor:
        level = sigma.reshape(-1, *(1,) * (x.ndim - 1))
        output = self.network(x, exact_estimate(x, sigma, self.path), level)
        denoised: Tensor = self.sampling.calculate_denoised(sigma, output, x)
        for hook in (model_options or {}).get("sampler_post_cfg_function", ()):
            denoised = hook({"denoised": denoised, "uncond_denoised": denoised})
        return denoised


def error(solver: Callable[..., Tensor], kind: str, steps: int, **options: Any) -> float:
    """Largest distance from the exact end after steps that are equal in half-log-SNR, in which all
    of the solvers have smooth errors."""
    model = GaussianDenoiser(kind)
    path = model.path
    start, end = (0.95, 0.05) if path is FLOW else (8.0, 0.05)
    lambdas = torch.linspace(
        path.half_log_snr(start), path.half_log_snr(end), steps + 1, dtype=torch.float64
    )
    sigmas = torch.tensor([path.sigma_at(value) for value in lambdas.tolist()], dtype=torch.float64)
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(1, 1, 4, 4) * start + 0.1
    made = solver(model, x, sigmas, disable=True, **options)
    return float((made - exact_end(x, start, end, path)).abs().max())


def seen_order(few: float, many: float) -> float:
    """Order of convergence that two errors show, the second of twice the steps."""
    return math.log2(few / many)


def no_noise(sigma: float) -> float:
    return 0.0


def _same(level: Tensor) -> Tensor:
    return level


STILL = {"eta": 0.0}
DETERMINISTIC: list[tuple[str, dict[str, Any], int]] = [
    ("euler", {}, 1),
    ("ddim", {}, 1),
    ("euler_cfg_pp", {}, 1),
    ("euler_ancestral", STILL, 1),
    ("euler_ancestral_cfg_pp", STILL, 1),
    ("gradient_estimation", {}, 1),
    ("gradient_estimation_cfg_pp", {}, 1),
    ("ipndm", {"max_order": 1}, 1),
    ("ipndm", {}, 1),
    ("heun", {}, 2),
    ("dpm_2", {}, 2),
    ("dpm_2_ancestral", STILL, 2),
    ("lms", {"order": 2}, 2),
    ("lms", {"order": 4}, 2),
    ("ipndm_v", {"max_order": 2}, 2),
    ("deis", {"max_order": 2}, 2),
    ("deis", {}, 2),
    ("dpmpp_2m", {}, 2),
    ("dpmpp_2m_cfg_pp", {}, 2),
    ("dpmpp_2s_ancestral", STILL, 2),
    ("dpmpp_sde", STILL, 2),
    ("dpmpp_2m_sde", STILL, 2),
    ("dpmpp_2m_sde_heun", STILL, 2),
    ("dpmpp_3m_sde", STILL, 2),
    ("res_multistep", {}, 2),
    ("res_multistep_cfg_pp", {}, 2),
    ("res_multistep_ancestral", STILL, 2),
    ("res_multistep_ancestral_cfg_pp", STILL, 2),
    ("exp_heun_2_x0", {}, 2),
    ("exp_heun_2_x0_sde", STILL, 2),
    ("er_sde", {"s_noise": 0.0, "noise_scaler": _same}, 2),
    ("seeds_2", STILL, 2),
    ("seeds_2", {"eta": 0.0, "solver_type": "phi_2"}, 2),
    ("seeds_3", STILL, 3),
    ("uni_pc", {}, 2),
    ("uni_pc_bh2", {}, 2),
    ("sa_solver", {"tau_func": no_noise, "predictor_order": 2, "corrector_order": 0}, 2),
    ("sa_solver", {"tau_func": no_noise, "predictor_order": 3, "corrector_order": 3}, 3),
    ("sa_solver_pece", {"tau_func": no_noise}, 3),
]
"""Solver, options without noise, order it has at least. Multistep solvers begin with first-order
steps, which limits what can be seen to about the second order."""
WITHOUT_ORDER: list[tuple[str, dict[str, Any]]] = [
    ("heunpp2", {}),
    ("dpm_fast", {}),
    ("ipndm_v", {}),
    ("dpmpp_2s_ancestral_cfg_pp", STILL),
]
"""Deterministic, but with weights that are not those of a consistent higher order (heunpp2,
ipndm_v), a last step of another order (dpm_fast), or estimates of two levels in one difference,
which does not vanish with the steps (dpmpp_2s_ancestral_cfg_pp): as today's pictures have them."""
