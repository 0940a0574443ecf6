"""Order of convergence on Gaussian data, where the trajectory is known in closed form.

For data N(c, s^2) the estimate is affine in x and the ODE keeps (x - alpha c) / sqrt(alpha^2 s^2 +
sigma^2). Doubling the steps must divide the error by two to the power of the order. Multistep
methods start with first-order steps, which limits what can be seen to about the second order; their
weights are proved exact on polynomials instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.sampling import noise_levels, solvers
from comfy.sampling.parameterisation import EXPLODING, FLOW, NoisePath
from comfy.sampling.solvers import lagrange, sa_solver

CENTRE, SPREAD = 0.7, 0.5


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


class GaussianDenoiser:
    """A denoiser with the `inner_model` chain solvers look at; positive and negative agree."""

    def __init__(self, path: NoisePath) -> None:
        self.path = path
        kind = "FLOW" if path is FLOW else "EPS"
        base = SimpleNamespace(model_sampling=noise_levels.build_model_sampling(kind))
        self.inner_model = SimpleNamespace(inner_model=base)

    def __call__(self, x: Tensor, sigma: Tensor, model_options: Any = None, **kw: Any) -> Tensor:
        denoised = exact_estimate(x, sigma, self.path)
        for hook in (model_options or {}).get("sampler_post_cfg_function", ()):
            denoised = hook({"denoised": denoised, "uncond_denoised": denoised})
        return denoised


def error(solver: Callable[..., Tensor], path: NoisePath, steps: int, **options: Any) -> float:
    start, end = (0.95, 0.05) if path is FLOW else (8.0, 0.05)
    # Uniform in half-log-SNR, in which all of these methods have smooth errors.
    lambdas = torch.linspace(
        path.half_log_snr(start), path.half_log_snr(end), steps + 1, dtype=torch.float64
    )
    sigmas = torch.tensor([path.sigma_at(value) for value in lambdas.tolist()], dtype=torch.float64)
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(1, 1, 4, 4) * start + 0.1
    made = solver(GaussianDenoiser(path), x, sigmas, disable=True, **options)
    return float((made - exact_end(x, start, end, path)).abs().max())


def slope(solver: Callable[..., Tensor], path: NoisePath, counts: tuple[int, int], **options: Any):
    few, many = (error(solver, path, count, **options) for count in counts)
    return math.log(few / many) / math.log(counts[1] / counts[0])


def no_noise(sigma: float) -> float:
    return 0.0


DETERMINISTIC = [
    ("euler", {}, 1),
    ("ddim", {}, 1),
    ("euler_cfg_pp", {}, 1),
    ("euler_ancestral", {"eta": 0.0}, 1),
    ("euler_ancestral_cfg_pp", {"eta": 0.0}, 1),
    ("ipndm", {"max_order": 1}, 1),
    ("heun", {}, 2),
    ("dpm_2", {}, 2),
    ("dpm_2_ancestral", {"eta": 0.0}, 2),
    ("lms", {"order": 2}, 2),
    ("lms", {"order": 4}, 2),
    ("ipndm_v", {"max_order": 2}, 2),
    ("deis", {"max_order": 2}, 2),
    ("dpmpp_2m", {}, 2),
    ("dpmpp_2s_ancestral", {"eta": 0.0}, 2),
    ("dpmpp_sde", {"eta": 0.0}, 2),
    ("dpmpp_2m_sde", {"eta": 0.0}, 2),
    ("dpmpp_2m_sde_heun", {"eta": 0.0}, 2),
    ("dpmpp_3m_sde", {"eta": 0.0}, 2),
    ("res_multistep", {}, 2),
    ("exp_heun_2_x0", {}, 2),
    ("seeds_2", {"eta": 0.0}, 2),
    ("seeds_2", {"eta": 0.0, "solver_type": "phi_2"}, 2),
    ("seeds_3", {"eta": 0.0}, 3),
    ("gradient_estimation", {}, 1),
    ("uni_pc", {}, 2),
    ("uni_pc_bh2", {}, 2),
    ("sa_solver", {"tau_func": no_noise, "predictor_order": 2, "corrector_order": 0}, 2),
    ("sa_solver", {"tau_func": no_noise, "predictor_order": 3, "corrector_order": 3}, 3),
    ("sa_solver_pece", {"tau_func": no_noise}, 3),
]


@pytest.mark.parametrize("path", [EXPLODING, FLOW], ids=["exploding", "flow"])
@pytest.mark.parametrize(("name", "options", "order"), DETERMINISTIC)
def test_a_solver_has_its_order(
    name: str, options: dict[str, Any], order: int, path: NoisePath
) -> None:
    function = solvers.find(name).function
    assert slope(function, path, (40, 80), **options) > order - 0.2


EVERY = {name for name, _, _ in DETERMINISTIC}
# Stochastic by nature, or with weights that are not those of a consistent higher order.
OTHERS = {
    "heunpp2", "dpm_fast", "dpm_adaptive", "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde_gpu",
    "dpmpp_2m_cfg_pp", "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde_gpu", "ddpm",
    "lcm", "ipndm_v", "res_multistep_cfg_pp", "res_multistep_ancestral",
    "res_multistep_ancestral_cfg_pp", "gradient_estimation_cfg_pp", "er_sde",
    "exp_heun_2_x0_sde",
}  # fmt: skip


def test_every_solver_is_either_proved_here_or_excused() -> None:
    assert set(solvers.MENU_NAMES) == EVERY | OTHERS


@pytest.mark.parametrize("name", ["dpm_fast", "heunpp2", "er_sde"])
def test_the_others_that_are_deterministic_converge(name: str) -> None:
    options = {"s_noise": 0.0, "noise_scaler": lambda level: level} if name == "er_sde" else {}
    assert error(solvers.find(name).function, EXPLODING, 160, **options) < 5e-3


@pytest.mark.parametrize("order", [2, 3])
def test_the_adaptive_solver_meets_a_tighter_tolerance(order: int) -> None:
    function = solvers.find("dpm_adaptive").function
    loose = error(function, EXPLODING, 2, order=order, rtol=0.1, atol=0.05)
    tight = error(function, EXPLODING, 2, order=order, rtol=1e-5, atol=1e-6)
    assert tight < 1e-3
    assert tight < loose


@pytest.mark.parametrize("path", [EXPLODING, FLOW], ids=["exploding", "flow"])
@pytest.mark.parametrize(
    "name",
    ["euler_ancestral", "dpmpp_2s_ancestral", "dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde",
     "dpm_2_ancestral", "er_sde", "seeds_2", "seeds_3", "sa_solver", "exp_heun_2_x0_sde"],
)  # fmt: skip
def test_a_stochastic_solver_keeps_the_marginal(name: str, path: NoisePath) -> None:
    torch.manual_seed(0)
    start, end = (0.98, 0.05) if path is FLOW else (20.0, 0.05)
    lambdas = torch.linspace(path.half_log_snr(start), path.half_log_snr(end), 61)
    sigmas = torch.tensor([path.sigma_at(value) for value in lambdas.tolist()])
    shape = (1, 1, 100, 100)
    data = CENTRE + SPREAD * torch.randn(shape)
    x = path.alpha(start) * data + start * torch.randn(shape)
    function = solvers.find(name).function
    made = function(GaussianDenoiser(path), x, sigmas, extra_args={"seed": 1}, disable=True)
    spread = math.sqrt((path.alpha(end) * SPREAD) ** 2 + end**2)
    assert float(made.mean()) == pytest.approx(path.alpha(end) * CENTRE, abs=0.03)
    assert float(made.std()) == pytest.approx(spread, rel=0.06)


def test_multistep_weights_integrate_polynomials_exactly() -> None:
    nodes, start, end = [1.3, 1.9, 2.2, 3.1], 1.3, 0.8
    for count in (1, 2, 3, 4):
        weights = lagrange.integrals(nodes[:count], start, end)
        for degree in range(count):
            made = sum(w * node**degree for w, node in zip(weights, nodes))
            exact = (end ** (degree + 1) - start ** (degree + 1)) / (degree + 1)
            assert made == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
def test_stochastic_adams_weights_integrate_exponentials_of_polynomials(tau: float) -> None:
    nodes, start, end, rate = [0.1, 0.4, 0.9], 0.9, 1.5, 1 + tau**2
    places = torch.linspace(start, end, 200_001, dtype=torch.float64)
    for count in (1, 2, 3):
        used = nodes[-count:]
        weights = sa_solver.adams_weights(used, start, end, tau, alpha=0.7)
        for degree in range(count):
            integrand = rate * torch.exp(rate * (places - end)) * places**degree
            exact = 0.7 * float(torch.trapezoid(integrand, places))
            made = sum(w * node**degree for w, node in zip(weights, used))
            assert made == pytest.approx(exact, rel=1e-7)
