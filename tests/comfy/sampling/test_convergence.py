"""Order of convergence on Gaussian data, where the trajectory is known in closed form.

Doubling the steps must divide the error by two to the power of the order. Multistep
methods start with first-order steps, which limits what can be seen to about the second order; their
weights are proved exact on polynomials instead.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from comfy.sampling import solvers
from comfy.sampling.solvers import lagrange, sa_solver
from tests.comfy.sampling.gaussian import (
    CENTRE,
    DETERMINISTIC,
    NETWORKS,
    SPREAD,
    STILL,
    WITHOUT_ORDER,
    GaussianDenoiser,
    error,
    seen_order,
)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize(("name", "options", "expected"), DETERMINISTIC)
def test_a_solver_has_its_order(
    name: str, options: dict[str, Any], expected: int, kind: str
) -> None:
    function = solvers.find(name).function
    errors = [error(function, kind, steps, **options) for steps in (40, 80)]
    assert seen_order(*errors) > expected - 0.2


@pytest.mark.usefixtures("paper_formulas")
@pytest.mark.parametrize("kind", NETWORKS)
def test_on_request_a_step_between_two_levels_keeps_to_one_unconditional_estimate(
    kind: str,
) -> None:
    function = solvers.find("dpmpp_2s_ancestral_cfg_pp").function
    errors = [error(function, kind, steps, **STILL) for steps in (40, 80)]
    assert seen_order(*errors) > 1.8


EVERY = {name for name, _, _ in DETERMINISTIC}
# Stochastic by nature, or with weights that are not those of a consistent higher order.
OTHERS = {name for name, _ in WITHOUT_ORDER} | {
    "dpm_adaptive", "dpmpp_sde_gpu", "dpmpp_2m_sde_gpu", "dpmpp_2m_sde_heun_gpu",
    "dpmpp_3m_sde_gpu", "ddpm", "lcm",
}  # fmt: skip


def test_every_solver_is_either_proved_here_or_excused() -> None:
    assert set(solvers.MENU_NAMES) == EVERY | OTHERS


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("name", ["dpm_fast", "heunpp2", "ipndm_v"])
def test_the_others_that_are_deterministic_converge(name: str, kind: str) -> None:
    assert error(solvers.find(name).function, kind, 160) < 5e-3


@pytest.mark.parametrize("order", [2, 3])
def test_the_adaptive_solver_meets_a_tighter_tolerance(order: int) -> None:
    function = solvers.find("dpm_adaptive").function
    loose = error(function, "eps", 2, order=order, rtol=0.1, atol=0.05)
    tight = error(function, "eps", 2, order=order, rtol=1e-5, atol=1e-6)
    assert tight < 1e-3
    assert tight < loose


@pytest.mark.parametrize("kind", ["eps", "flow"])
@pytest.mark.parametrize(
    "name",
    ["euler_ancestral", "dpmpp_2s_ancestral", "dpmpp_sde", "dpmpp_2m_sde", "dpmpp_3m_sde",
     "dpm_2_ancestral", "er_sde", "seeds_2", "seeds_3", "sa_solver", "exp_heun_2_x0_sde"],
)  # fmt: skip
def test_a_stochastic_solver_keeps_the_marginal(name: str, kind: str) -> None:
    torch.manual_seed(0)
    model = GaussianDenoiser(kind)
    path = model.path
    start, end = (0.98, 0.05) if kind == "flow" else (20.0, 0.05)
    lambdas = torch.linspace(path.half_log_snr(start), path.half_log_snr(end), 61)
    sigmas = torch.tensor([path.sigma_at(value) for value in lambdas.tolist()])
    shape = (1, 1, 100, 100)
    data = CENTRE + SPREAD * torch.randn(shape)
    x = path.alpha(start) * data + start * torch.randn(shape)
    function = solvers.find(name).function
    made = function(model, x, sigmas, extra_args={"seed": 1}, disable=True)
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
    nodes = torch.tensor([0.1, 0.4, 0.9], dtype=torch.float64)
    start, end, alpha = (nodes.new_tensor(number) for number in (0.9, 1.5, 0.7))
    rate, places = 1 + tau**2, torch.linspace(0.9, 1.5, 200_001, dtype=torch.float64)
    for count in (1, 2, 3):
        used = nodes[-count:]
        weights = sa_solver.adams_weights(used, start, end, tau, alpha)
        for degree in range(count):
            integrand = rate * torch.exp(rate * (places - end)) * places**degree
            exact = float(alpha * torch.trapezoid(integrand, places))
            made = sum(w * node**degree for w, node in zip(weights, used))
            assert made == pytest.approx(exact, rel=1e-7)


@pytest.mark.parametrize("apart", [2.0**-21, 1e-4])
@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_stochastic_adams_weights_of_nodes_whose_powers_single_precision_takes_for_the_same(
    apart: float, tau: float
) -> None:
    nodes = -4 + torch.arange(4) * apart
    start, end = nodes[-1], nodes[-1] + 2 * apart
    weights = sa_solver.adams_weights(nodes, start, end, tau, alpha=torch.tensor(1.0))
    length, distances = float(end - start), (nodes.double() - start).tolist()
    for degree in range(4):  # steps this short hide the exponential
        exact = (1 + tau**2) * length ** (degree + 1) / (degree + 1)
        made = sum(w * distance**degree for w, distance in zip(weights, distances))
        assert made == pytest.approx(exact, rel=1e-2)
