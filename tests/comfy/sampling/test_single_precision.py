"""Runs whose steps are so short or so long, or levels so low or so high, that a rounded factor is a
digit of the picture.

Each method is written here a second time from its paper, operation by operation in single
precision, as pictures were made; in double precision each of these runs ends elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate
from torch import Tensor

from comfy.sampling import schedules, solvers
from tests.comfy.sampling.support import EDM, FLUX, SD1, SD3, SMALL, ZERO_SNR, Guided


class Draws:
    """The same noise for both runs."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(11)

    def __call__(self, sigma: Any, sigma_next: Any) -> Tensor:
        return torch.randn(SMALL, generator=self.generator)


def noisy_levels(sigmas: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Steps between levels above zero."""
    yield from ((i, *pair) for i, pair in enumerate(pairwise(sigmas)) if pair[1] > 0)


def ddpm(model: Guided, x: Tensor, sigmas: Tensor, draw: Draws) -> Tensor:
    for sigma, after in pairwise(sigmas):
        noise = (x - model.at(x, sigma)) / sigma
        bar, bar_after = (1 / (level * level + 1) for level in (sigma, after))
        alpha = bar / bar_after
        unit = x / torch.sqrt(1 + sigma**2)
        mean = (1 / alpha).sqrt() * (unit - (1 - alpha) * noise / (1 - bar).sqrt())
        if after > 0:
            variance = (1 - alpha) * (1 - bar_after) / (1 - bar)
            mean = (mean + variance.sqrt() * draw(sigma, after)) * torch.sqrt(1 + after**2)
        x = mean
    return x


def er_sde(model: Guided, x: Tensor, sigmas: Tensor, draw: Draws) -> Tensor:
    def phi(level: Tensor) -> Tensor:
        return level * ((level**0.3).exp() + 10)

    levels = model.half_log_snr(sigmas).neg().exp()
    estimates: list[Tensor] = []
    slopes: list[Tensor] = []
    for i, sigma, after in noisy_levels(sigmas):
        estimates.append(model.at(x, sigma))
        start, end = levels[i], levels[i + 1]
        alpha, share, step = after / end, phi(end) / phi(start), end - start
        x = alpha / (sigma / start) * share * x + alpha * (1 - share) * estimates[-1]
        width = -step / 200
        places = end + torch.arange(200.0) * width
        if i >= 1:
            slopes.append((estimates[-1] - estimates[-2]) / (start - levels[i - 1]))
            area = (1 / phi(places)).sum() * width
            x = x + alpha * (step + area * phi(end)) * slopes[-1]
        if i >= 2:
            bend = (slopes[-1] - slopes[-2]) / ((start - levels[i - 2]) / 2)
            area = ((places - start) / phi(places)).sum() * width
            x = x + alpha * (step**2 / 2 + area * phi(end)) * bend
        x = x + alpha * draw(sigma, after) * (end**2 - start**2 * share**2).sqrt()
    return model.at(x, sigmas[-2])


def dpmpp_3m_sde(model: Guided, x: Tensor, sigmas: Tensor, draw: Draws) -> Tensor:
    lambdas = model.half_log_snr(sigmas)
    h = lambdas.diff()
    estimates: list[Tensor] = []
    for i, sigma, after in noisy_levels(sigmas):
        estimates.append(model.at(x, sigma))
        alpha, twice = after * lambdas[i + 1].exp(), 2 * h[i]
        x = after / sigma * (-h[i]).exp() * x - alpha * (-twice).expm1() * estimates[-1]
        phi_2 = (-twice).expm1() / twice + 1
        if i >= 1:
            slope = (estimates[-1] - estimates[-2]) / (h[i - 1] / h[i])
        if i >= 2:
            ratio, before = h[i - 1] / h[i], h[i - 2] / h[i]
            bend = (slope - (estimates[-2] - estimates[-3]) / before) / (ratio + before)
            x = x + alpha * phi_2 * (slope + bend * ratio) - alpha * (phi_2 / twice - 0.5) * bend
        elif i == 1:
            x = x + alpha * phi_2 * slope
        x = x + draw(sigma, after) * after * (-twice).expm1().neg().sqrt()
    return model.at(x, sigmas[-2])


def deis(model: Guided, x: Tensor, sigmas: Tensor, draw: Draws) -> Tensor:
    # The lower end in single precision, the higher one in double, and so are its results.
    low, high = torch.tensor(0.002).square() + 1, torch.tensor(80.0, dtype=torch.float64) ** 2 + 1
    rise = 2 * (torch.tensor(np.log(low.numpy())) / 1e-3 - high.log()) / (1e-3 - 1)
    start = high.log() - 0.5 * rise
    times = ((start**2 + 2 * rise * (sigmas**2 + 1).log()).sqrt() - start) / rise
    slopes: list[Tensor] = []
    for i, sigma, after in noisy_levels(sigmas):
        slopes = [(x - model.at(x, sigma)) / sigma, *slopes][:3]
        if i == 0:
            x = x + (after - sigma) * slopes[0]
            continue
        places = torch.linspace(float(times[i]), float(times[i + 1]), 10_000)
        places.requires_grad_()
        with torch.enable_grad():
            alpha = torch.exp(-0.5 * places**2 * (rise + start - start) - places * start)
            (falling,) = torch.autograd.grad(alpha.log().sum(), places)
        alpha, places = alpha.detach(), places.detach()
        speed = -0.5 * falling / torch.sqrt(alpha * (1 - alpha))
        nodes = times[[i - back for back in range(len(slopes))]]
        for j, slope in enumerate(slopes):
            basis = torch.ones_like(places)
            for other in (*nodes[:j], *nodes[j + 1 :]):
                basis = basis * ((places - other) / (nodes[j] - other))
            x = x + (speed * basis).sum() * ((times[i + 1] - times[i]) / 10_000) * slope
    return model.at(x, sigmas[-2])


def adams(nodes: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Weights that integrate 2 e^(2 (s - end)) times the polynomial through the nodes."""
    powers = torch.arange(float(len(nodes)))
    ends = end**powers - start**powers * (-2 * (end - start)).exp()
    depth = powers[:, None] - powers
    factorials = (powers + 1).lgamma()
    sizes = (factorials[:, None] - factorials - depth * math.log(2)).exp()
    terms = sizes * (-1) ** depth.abs() * (depth >= 0)
    return torch.linalg.solve(torch.vander(nodes, increasing=True).T, terms @ ends)


def sa_solver(model: Guided, x: Tensor, sigmas: Tensor, draw: Draws) -> Tensor:
    """With the noise of the whole reverse-time equation."""
    lambdas, last = model.half_log_snr(sigmas), len(sigmas) - 2
    estimates: list[Tensor] = []

    def step(x: Tensor, order: int, newest: int, i: int, noise: Any) -> Tensor:
        nodes = lambdas[newest + 1 - order : newest + 1]
        weights = adams(nodes, lambdas[i], lambdas[i + 1])
        mean = sum(weight * each for weight, each in zip(weights, estimates[-order:]))
        after, h = sigmas[i + 1], lambdas[i + 1] - lambdas[i]
        kept = after / sigmas[i] * (-h).exp() * x + after * lambdas[i + 1].exp() * mean
        return kept + noise * after * (-2 * h).expm1().neg().sqrt()

    predicted, noise = x, torch.zeros(())
    for i, sigma, after in noisy_levels(sigmas):
        estimates.append(model.at(predicted, sigma))
        x = step(x, min(4, i + 1, last + 1 - i), i, i - 1, noise) if i else predicted
        noise = draw(sigma, after)
        predicted = step(x, min(3, i + 1, last - i), i, i, noise)
    return model.at(predicted, sigmas[-2])


def split(sigma: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Level that a step goes down to, and the noise it adds."""
    up = min(after, (after**2 * (sigma**2 - after**2) / sigma**2) ** 0.5)
    return (after**2 - up**2) ** 0.5, up


def euler_ancestral(model: Guided, x: Tensor, sigmas: Tensor, draw: Draws) -> Tensor:
    for sigma, after in pairwise(sigmas):
        down, up = split(sigma, after)
        estimate = model.at(x, sigma)
        if down == 0:
            x = estimate
        else:
            x = x + (x - estimate) / sigma * (down - sigma) + draw(sigma, after) * up
    return x


def dpm_2_ancestral(model: Guided, x: Tensor, sigmas: Tensor, draw: Draws) -> Tensor:
    for sigma, after in pairwise(sigmas):
        down, up = split(sigma, after)
        slope = (x - model.at(x, sigma)) / sigma
        if down == 0:
            x = x + slope * (down - sigma)
            continue
        middle = sigma.log().lerp(down.log(), 0.5).exp()
        half = x + slope * (middle - sigma)
        x = x + (half - model.at(half, middle)) / middle * (down - sigma)
        x = x + draw(sigma, after) * up
    return x


def dpmpp_2s_ancestral(model: Guided, x: Tensor, sigmas: Tensor, draw: Draws) -> Tensor:
    for sigma, after in pairwise(sigmas):
        down, up = split(sigma, after)
        estimate = model.at(x, sigma)
        if down == 0:
            x = x + (x - estimate) / sigma * (down - sigma)
        else:
            start, end = -sigma.log(), -down.log()
            h = end - start
            middle = (-(start + h / 2)).exp()
            half = middle / (-start).exp() * x - (-h / 2).expm1() * estimate
            gain = -(-h).expm1()
            x = (-end).exp() / (-start).exp() * x + gain * model.at(half, middle)
        if after > 0:
            x = x + draw(sigma, after) * up
    return x


def heunpp2(model: Guided, x: Tensor, sigmas: Tensor, draw: Draws) -> Tensor:
    for i, (sigma, after) in enumerate(pairwise(sigmas)):
        slope = (x - model.at(x, sigma)) / sigma
        ahead = x + slope * (after - sigma)
        if after > 0:
            second = (ahead - model.at(ahead, after)) / after
            last = sigmas[i + 2]
            if last == 0:
                share = after / (2 * sigmas[0])
                slope = (1 - share) * slope + share * second
            else:
                ahead = ahead + second * (last - after)
                third = (ahead - model.at(ahead, last)) / last
                share, other = after / (3 * sigmas[0]), last / (3 * sigmas[0])
                slope = (1 - share - other) * slope + share * second + other * third
        x = x + slope * (after - sigma)
    return x


def ipndm(model: Guided, x: Tensor, sigmas: Tensor, draw: Draws) -> Tensor:
    rows = ((1,), (3, -1), (23, -16, 5), (55, -59, 37, -9))
    slopes: list[Tensor] = []
    for _, sigma, after in noisy_levels(sigmas):
        slopes = [(x - model.at(x, sigma)) / sigma, *slopes][:4]
        row = rows[len(slopes) - 1]
        total = sum((weight * slope for weight, slope in zip(row, slopes)), torch.zeros(()))
        x = x + (after - sigma) * total / sum(row)
    return model.at(x, sigmas[-2])


def lms(model: Guided, x: Tensor, sigmas: Tensor, draw: Draws) -> Tensor:
    slopes: list[Tensor] = []
    for i, sigma, after in noisy_levels(sigmas):
        slopes = [(x - model.at(x, sigma)) / sigma, *slopes][:4]
        nodes = sigmas[[i - back for back in range(len(slopes))]]

        total = torch.zeros(())
        for j, slope in enumerate(slopes):
            others = torch.cat([nodes[:j], nodes[j + 1 :]])

            def basis(level: float, node: Tensor = nodes[j], others: Tensor = others) -> float:
                return float(((level - others) / (node - others)).prod())

            total = (
                total + integrate.quad(basis, sigma, after, epsrel=1e-4, full_output=1)[0] * slope
            )
        x = x + total
    return model.at(x, sigmas[-2])


def euler_ancestral_cfg_pp(model: Guided, x: Tensor, sigmas: Tensor, draw: Draws) -> Tensor:
    alphas = sigmas * model.half_log_snr(sigmas).exp()
    for i, sigma, after in noisy_levels(sigmas):
        estimate = model.at(x, sigma)
        direction = (x - alphas[i] * estimate) / sigma
        down, up = split(sigma / alphas[i], after / alphas[i + 1])
        x = alphas[i + 1] * estimate + alphas[i + 1] * down * direction
        x = x + alphas[i + 1] * draw(sigma, after) * up
    return model.at(x, sigmas[-2])


METHODS: dict[str, Callable[..., Tensor]] = {
    "ddpm": ddpm, "er_sde": er_sde, "dpmpp_3m_sde": dpmpp_3m_sde, "deis": deis,
    "sa_solver": sa_solver, "euler_ancestral": euler_ancestral, "dpm_2_ancestral": dpm_2_ancestral,
    "dpmpp_2s_ancestral": dpmpp_2s_ancestral, "heunpp2": heunpp2, "ipndm": ipndm, "lms": lms,
    "euler_ancestral_cfg_pp": euler_ancestral_cfg_pp,
}  # fmt: skip
WITHOUT_NOISE = ("deis", "heunpp2", "ipndm", "lms")
RUNS = [
    ("ddpm", ZERO_SNR, "kl_optimal", 3),
    ("ddpm", FLUX, "exponential", 80),
    ("er_sde", SD1, "kl_optimal", 80),
    ("er_sde", EDM, "kl_optimal", 20),
    ("dpmpp_3m_sde", SD3, "kl_optimal", 40),
    ("dpmpp_3m_sde", EDM, "kl_optimal", 40),
    ("deis", FLUX, "normal", 12),
    ("deis", FLUX, "ddim_uniform", 3),
    ("deis", ZERO_SNR, "karras", 12),
    ("sa_solver", SD1, "simple", 50),
    ("sa_solver", SD3, "simple", 50),
    # Steps so short that the weights are thousands of times the step, of either sign.
    ("sa_solver", ("FLOW", {"shift": 20.0}), "linear_quadratic", 160),
    ("sa_solver", EDM, "linear_quadratic", 100),
    # From far above the latent's own size, of which the last long step leaves what rounding leaves.
    ("ddpm", ZERO_SNR, "linear_quadratic", 5),
    ("euler_ancestral", ZERO_SNR, "normal", 2),
    ("euler_ancestral", ZERO_SNR, "exponential", 2),
    ("dpm_2_ancestral", ZERO_SNR, "linear_quadratic", 2),
    ("dpmpp_2s_ancestral", ZERO_SNR, "exponential", 1),
    ("dpmpp_2s_ancestral", ZERO_SNR, "linear_quadratic", 8),
    ("heunpp2", ZERO_SNR, "sgm_uniform", 4),
    ("ipndm", ZERO_SNR, "exponential", 8),
    ("euler_ancestral_cfg_pp", ZERO_SNR, "ddim_uniform", 80),
    # Uneven steps, where terms of a basis polynomial are far larger than their product.
    ("lms", SD3, "linear_quadratic", 8),
]


def whole(sigma: Any) -> float:
    return 1.0


@pytest.mark.parametrize(("name", "kind", "scheduler", "steps"), RUNS)
def test_a_run_ends_where_single_precision_takes_it(
    name: str, kind: tuple[str, dict[str, Any]], scheduler: str, steps: int
) -> None:
    model = Guided(*kind)
    sigmas = schedules.calculate_sigmas(model.sampling, scheduler, steps)
    sigmas = sigmas[sigmas < 1] if model.flow else sigmas  # from pure noise they start elsewhere
    start = torch.randn(SMALL, generator=torch.Generator().manual_seed(5)) * sigmas[0]
    options: dict[str, Any] = {} if name in WITHOUT_NOISE else {"noise_sampler": Draws()}
    if name == "sa_solver":
        options["tau_func"] = whole
    made = solvers.find(name).function(model, start, sigmas, disable=True, **options)
    expected = METHODS[name](model, start, sigmas, Draws())
    torch.testing.assert_close(made, expected, rtol=0, atol=3e-5)
