"""SA-Solver: stochastic Adams methods in half-log-SNR.

With a noise share tau the exact step is
x(t) = sigma_t / sigma_s * e^(-tau^2 h) * x + alpha_t * (1 + tau^2) * integral of
e^((1 + tau^2)(lambda - lambda_t)) * D(lambda) + sigma_t * sqrt(1 - e^(-2 tau^2 h)) * noise;
the estimate D is a polynomial through the latest ones, the predictor's without and the corrector's
with the one at t.
Source: Xue et al. 2023, https://arxiv.org/abs/2309.05019, equations 14 to 18.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comfy.sampling.noise import NoiseSampler
from comfy.sampling.solvers.tensor_forms import sigma_to_half_log_snr
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory

TauFunction = Callable[[Any], float]
"""From a level to its noise share."""

# Part of the sampling in which noise is added unless the caller says otherwise.
DEFAULT_START_PERCENT, DEFAULT_END_PERCENT = 0.2, 0.8


def get_tau_interval_func(start_sigma: float, end_sigma: float, eta: float = 1.0) -> TauFunction:
    """tau = eta between two levels (start above end), 0 outside."""

    def tau(sigma: Any) -> float:
        if eta <= 0:
            return 0.0
        return eta if start_sigma >= float(sigma) >= end_sigma else 0.0

    return tau


# Exact to a billionth for steps of up to 20 half-log-SNRs.
QUADRATURE_POINTS = 24


def _moments(start: Tensor, end: Tensor, rate: float, count: int) -> Tensor:
    """rate * integral over [start, end] of e^(rate (s - end)) * s^k, for k < count."""
    powers = torch.arange(count, dtype=start.dtype)
    ends = end**powers - start**powers * torch.exp(rate * (start - end))
    return torch.tensor(_parts(count, rate, start.dtype), dtype=start.dtype) @ ends


@lru_cache(maxsize=64)
def _parts(count: int, rate: float, dtype: torch.dtype) -> list[list[float]]:
    """Integration by parts: factors of s^j in rate * e^(-rate s) * integral of e^(rate s) * s^k.

    For d = k - j from 0 on they are (-1)^d * k! / j! / rate^d.
    """
    powers = torch.arange(count, dtype=dtype)
    depth = powers[:, None] - powers
    log_factorials = (powers + 1).lgamma()
    sizes = (log_factorials[:, None] - log_factorials - depth * math.log(rate)).exp()
    factors: list[list[float]] = (sizes * (1 - 2 * (depth % 2)) * (depth >= 0)).tolist()
    return factors


def adams_weights(
    nodes: Tensor, start: Tensor, end: Tensor, tau: float, alpha: Tensor
) -> list[float]:
    """Weights of the estimates at half-log-SNRs `nodes` for a step from start to end.

    They integrate every polynomial of a degree below the number of nodes. Powers are taken of the
    half-log-SNRs themselves, not of their distances, and in their precision, as pictures were made:
    with many steps what this rounds is a digit of the picture. Where the nodes are so near that
    their powers are the same, or that the weights do not even add up to the step, there are no such
    pictures, and double precision takes over.
    """
    rate = 1 + tau**2
    integrals, singular = _integrals(nodes, start, end, rate)
    whole = -math.expm1(float(rate * (start - end)))
    if singular or not abs(float(integrals.sum()) - whole) <= abs(whole):
        integrals = _integrals_of_distances(nodes, start, end, rate)
    weights: list[float] = (alpha * integrals).tolist()
    return weights


def _integrals(nodes: Tensor, start: Tensor, end: Tensor, rate: float) -> tuple[Tensor, bool]:
    """What `_moments` are for the polynomials that are 1 at one node and 0 at the others.

    Also whether the nodes' powers are singular in their precision, when the first is no answer.
    """
    powers = torch.vander(nodes, increasing=True).T
    integrals, failed = torch.linalg.solve_ex(powers, _moments(start, end, rate, len(nodes)))
    return integrals, bool(failed)


def _integrals_of_distances(nodes: Tensor, start: Tensor, end: Tensor, rate: float) -> Tensor:
    """The same in double precision, of distances from the end, by Gauss's quadrature."""
    before, places = float(start.double() - end), (nodes.double() - end).numpy(force=True)
    points, shares = np.polynomial.legendre.leggauss(QUADRATURE_POINTS)
    points = before * (1 - points) / 2
    shares = -before / 2 * shares * rate * np.exp(rate * points)
    integrals = []
    for place in places:
        others = places[places != place]
        basis = np.prod((points[:, None] - others) / (place - others), axis=1)
        integrals.append(float(shares @ basis))
    return nodes.new_tensor(integrals, dtype=torch.float64)


def simple_weights(
    nodes: Tensor, start: Tensor, end: Tensor, tau: float, alpha: Tensor, corrector: bool
) -> list[float]:
    """Second-order weights in the manner of UniPC: equal to `adams_weights` to leading order."""
    rate, h = 1 + tau**2, end - start
    total = (-h * rate).expm1().neg()
    if corrector:
        newer = 0.5 * rate * h
    else:
        newer = total - 0.5 * rate * h**2 / (nodes[-2] - start)
    return [float(alpha * (total - newer)), float(alpha * newer)]


class _Orders:
    """Orders of predictor and corrector by step: rising at the start, falling at the end."""

    def __init__(self, run: Trajectory, predictor: int, corrector: int, pece: bool) -> None:
        self.steps, self.clean_end = run.steps, run.levels[-1] == 0
        self.predictor, self.corrector, self.pece = predictor, corrector, pece

    def at(self, step: int, known: int) -> tuple[int, int]:
        predictor, corrector = min(self.predictor, known), min(self.corrector, known)
        last_to_clean = self.clean_end and step == self.steps - 1
        if step == 0 or (last_to_clean and not self.pece):
            corrector = 0
        if self.clean_end:
            predictor = min(predictor, self.steps - 1 - step)
            corrector = min(corrector, self.steps - step)
        return predictor, corrector


@torch.no_grad()
def sample_sa_solver(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    tau_func: TauFunction | None = None,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
    predictor_order: int = 3,
    corrector_order: int = 4,
    use_pece: bool = False,
    simple_order_2: bool = False,
) -> Tensor:
    """Stochastic Adams predictor and corrector.

    Args:
        tau_func: Noise share by level; the default adds noise in the middle of the sampling.
        use_pece: Evaluate the corrected latent again.
        simple_order_2: Use simpler weights at order two.
    """
    if len(sigmas) <= 1:
        return x
    run = Trajectory(model, sigmas, extra_args, callback, disable, finite_snr=True, distinct=True)
    run.use_noise(x, noise_sampler)
    tau_of = tau_func or _default_tau(run)
    noisy = run.noisy
    lambdas = sigma_to_half_log_snr(noisy, run.sampling)
    alphas, ratios, lengths = noisy * lambdas.exp(), noisy[1:] / noisy[:-1], lambdas.diff()
    orders = _Orders(run, predictor_order, corrector_order, use_pece)
    keep = max(predictor_order, corrector_order)
    estimates: list[Tensor] = []
    predicted, noise, tau, kept = x, None, 0.0, 1.0

    def weighted(order: int, step: int, to: int, corrector: bool) -> Tensor:
        start = lambdas[step - 1] if corrector else lambdas[step]
        nodes = lambdas[step - order + 1 : step + 1]
        if simple_order_2 and order == 2:
            weights = simple_weights(nodes, start, lambdas[to], tau, alphas[to], corrector)
        else:
            weights = adams_weights(nodes, start, lambdas[to], tau, alphas[to])
        first, *others = (w * estimate for w, estimate in zip(weights, estimates[-order:]))
        return sum(others, start=first)

    for sigma, sigma_next in run:
        step = run.index
        denoised = run.denoise(predicted, sigma)
        estimates = [*estimates, denoised][-keep:]
        predictor, corrector = orders.at(step, len(estimates))
        if corrector == 0:
            x = predicted
        else:
            x = x * kept + weighted(corrector, step, step, corrector=True)
            if noise is not None:  # the predictor's noise of this step
                x = x + noise
            if use_pece:
                denoised = run.denoise(x, sigma, report=False)
                estimates[-1] = denoised
        if sigma_next == 0:
            predicted = denoised
            continue
        tau, noise = float(tau_of(sigma_next)), None
        kept = float(ratios[step] * (-(tau**2) * lengths[step]).exp())
        predicted = x * kept + weighted(predictor, step, step + 1, corrector=False)
        if tau > 0 and s_noise > 0:
            share = float((-2 * tau**2 * lengths[step]).expm1().neg().sqrt())
            noise = run.draw(sigma, sigma_next) * sigma_next * share * s_noise
            predicted = predicted + noise
    return predicted


def _default_tau(run: Trajectory) -> TauFunction:
    if run.sampling is None:
        return get_tau_interval_func(0.0, 0.0, eta=0.0)
    to_sigma = run.sampling.percent_to_sigma
    return get_tau_interval_func(to_sigma(DEFAULT_START_PERCENT), to_sigma(DEFAULT_END_PERCENT))


@torch.no_grad()
def sample_sa_solver_pece(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    tau_func: TauFunction | None = None,
    s_noise: float = 1.0,
    noise_sampler: NoiseSampler | None = None,
    predictor_order: int = 3,
    corrector_order: int = 4,
    simple_order_2: bool = False,
) -> Tensor:
    """SA-Solver that evaluates the corrected latent again."""
    return sample_sa_solver(
        model, x, sigmas, extra_args, callback, disable, tau_func, s_noise, noise_sampler,
        predictor_order, corrector_order, use_pece=True, simple_order_2=simple_order_2,
    )  # fmt: skip
