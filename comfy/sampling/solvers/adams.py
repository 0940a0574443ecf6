"""Linear multistep solvers: the ODE's slope is a polynomial through the latest slopes.

All integrate dx / dsigma; they differ in the variable the polynomial is in and in how many slopes
they keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comfy.sampling.solvers import lagrange
from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory

# Adams-Bashforth weights for equal steps, newest slope first; divided by their sum.
EQUAL_STEP_WEIGHTS = ((1,), (3, -1), (23, -16, 5), (55, -59, 37, -9))

# Exponential-integrator weights are integrals over this many points, a plain sum as in the
# implementation pictures were made with.
DEIS_POINTS = 10000
# Levels 0.002 and 80 at times 1e-3 and 1 define the time in which DEIS interpolates.
DEIS_TIME_START, DEIS_SIGMA_MIN, DEIS_SIGMA_MAX = 1e-3, 0.002, 80.0


def _deis_beta() -> tuple[float, float]:
    """d log(sigma^2 + 1) / d time is growth * time + start; the lower end in single precision."""
    low = np.log(np.float32(DEIS_SIGMA_MIN) ** 2 + 1) / np.float32(DEIS_TIME_START)
    high = math.log(DEIS_SIGMA_MAX**2 + 1)
    growth = 2 * (float(low) - high) / (DEIS_TIME_START - 1)
    return growth, high - 0.5 * growth


DEIS_GROWTH, DEIS_START = _deis_beta()


def _integrate(
    run: Trajectory, x: Tensor, step: Callable[[Tensor, list[Tensor]], Tensor], keep: int
) -> Tensor:
    """Steps of x = step(x, the latest slopes, newest first).

    The step to a clean level takes the estimate itself: no slope exists at zero. Each solver adds
    in the order of pictures so far: a long step from a level far above the latent's own size
    leaves of x what rounding leaves.
    """
    slopes: list[Tensor] = []
    for sigma, sigma_next in run:
        denoised = run.denoise(x, sigma)
        if sigma_next == 0:
            x = denoised
            continue
        slopes = [(x - denoised) / sigma, *slopes][:keep]
        x = step(x, slopes)
    return x


def _weighted(slopes: Sequence[Tensor], weights: Sequence[Any]) -> Tensor:
    """Sum of slopes, the newest first."""
    total = slopes[0] * weights[0]
    for slope, weight in zip(slopes[1:], weights[1:]):
        total = total + slope * weight
    return total


def _newest(levels: Sequence[float] | np.ndarray, step: int, count: int) -> list[float]:
    return [levels[step - back] for back in range(min(count, step + 1))]


def linear_multistep_coeff(order: int, t: Sequence[float] | np.ndarray, i: int, j: int) -> float:
    """Weight of one of the latest slopes in step i of Adams-Bashforth; `sample_lms` takes all.

    Args:
        order: How many slopes the step takes.
        t: Levels of the run.
        i: The step, from t[i] to t[i + 1].
        j: Which slope, 0 for the newest.
    Raises:
        ValueError: So many slopes do not exist yet.
    """
    if order > i + 1:
        raise ValueError(f"order {order} needs {order} slopes, and step {i} has {i + 1}")
    return lagrange.integrals(_newest(t, i, order), t[i], t[i + 1])[j]


@torch.no_grad()
def sample_lms(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    order: int = 4,
) -> Tensor:
    """Adams-Bashforth over the actual levels, up to the given order.

    Source: Katherine Crowson's use of the classical method in sigma; Hairer et al., Solving ODEs I.
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable, distinct=True)
    levels = run.sigmas.cpu().numpy()

    def step(x: Tensor, slopes: list[Tensor]) -> Tensor:
        start, end = levels[run.index : run.index + 2]
        nodes = _newest(levels, run.index, order)
        return x + _weighted(slopes, lagrange.integrals(nodes, start, end))

    return _integrate(run, x, step, order)


@torch.no_grad()
def sample_ipndm(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    max_order: int = 4,
) -> Tensor:
    """Adams-Bashforth with the weights of equal steps, whatever the levels.

    Source: Zhang and Chen 2022, https://arxiv.org/abs/2204.13902, equation 14 (iPNDM).
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable)

    def step(x: Tensor, slopes: list[Tensor]) -> Tensor:
        row = EQUAL_STEP_WEIGHTS[len(slopes) - 1]
        start, end = run.levels[run.index : run.index + 2]
        return x + _weighted(slopes, row) * (end - start) / sum(row)

    return _integrate(run, x, step, max_order)


@torch.no_grad()
def sample_ipndm_v(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    max_order: int = 4,
) -> Tensor:
    """iPNDM with weights for the actual steps (Zhou et al. 2023, https://arxiv.org/abs/2312.00094).

    From the third order on the weights follow the published implementation, whose differences
    from exact Adams-Bashforth weights pictures depend on.
    """
    run = Trajectory(model, sigmas, extra_args, callback, disable, distinct=True)

    lengths = run.sigmas.cpu().diff()

    def step(x: Tensor, slopes: list[Tensor]) -> Tensor:
        ahead, *back = lengths[run.index - len(slopes) + 1 : run.index + 1].flip(0)
        return x + _weighted(slopes, _variable_step_shares(ahead, back)) * ahead

    return _integrate(run, x, step, max_order)


def _variable_step_shares(ahead: Tensor, back: Sequence[Tensor]) -> list[Any]:
    """Shares of the latest slopes for a step `ahead` after the steps `back`, newest first.

    In the precision of the levels, as pictures were made.
    """
    if not back:
        return [1.0]
    first = ahead / back[0]
    shares = [1 + first / 2, -first / 2]
    if len(back) >= 2:
        two = ahead + back[0]
        pair = back[0] + back[1]
        bend = (1 - ahead / (3 * two) * (ahead * two) / (back[0] * pair)) / 2
        ratio = back[0] / back[1]
        shares = [shares[0] + bend, shares[1] - (1 + ratio) * bend, bend * back[0] / back[1]]
    if len(back) >= 3:
        three, triple = two + back[1], pair + back[2]
        jerk = (1 - ahead / (3 * two)) / 2 + (1 - ahead / (2 * two)) * ahead / (6 * three)
        jerk = jerk * (ahead * two * three) / (back[0] * pair * triple)
        far = back[0] * pair / (back[1] * (back[1] + back[2]))
        shares = [
            shares[0] + jerk,
            shares[1] - (1 + ratio + far) * jerk,
            shares[2] + (ratio + far * (1 + back[1] / back[2])) * jerk,
            -jerk * far * back[0] / back[1],
        ]
    return shares


def _deis_times(levels: Tensor) -> Tensor:
    """Variance-preserving times of levels, in their precision, as pictures were made: the square of
    a low level is lost beside one, and so are digits of its time.
    """
    variances = (levels**2 + 1).log()
    return ((DEIS_START**2 + 2 * DEIS_GROWTH * variances).sqrt() - DEIS_START) / DEIS_GROWTH


def _deis_weights(times: Tensor, place: int, order: int) -> Tensor:
    """Weights of the latest slopes for the step from a time to the next.

    Integrals of d sigma / d time times each polynomial that is 1 at one of the latest times and 0
    at the others, a plain sum in the precision of the times, as pictures were made.
    """
    begin, end = times[place], times[place + 1]
    points = torch.linspace(float(begin), float(end), DEIS_POINTS, dtype=times.dtype)
    alpha = torch.exp(-0.5 * points**2 * DEIS_GROWTH - points * DEIS_START)
    one = (1 / alpha) * alpha  # what automatic differentiation of log(alpha) leaves of it
    rise = one * DEIS_GROWTH * points + one * DEIS_START
    d_sigma = 0.5 * rise / torch.sqrt(alpha * (1 - alpha))
    nodes = [times[place - back] for back in range(order)]
    past = [points - node for node in nodes]
    sums = []
    for node in nodes:
        factors = [p / (node - other) for p, other in zip(past, nodes) if other is not node]
        sums.append(torch.sum(d_sigma * math.prod(factors[1:], start=factors[0])))
    return torch.stack(sums) * ((end - begin) / DEIS_POINTS)


@torch.no_grad()
def sample_deis(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    max_order: int = 3,
    deis_mode: str = "tab",
) -> Tensor:
    """Slopes as a polynomial in variance-preserving time, up to four of them (tAB-DEIS).

    Source: Zhang and Chen 2022, https://arxiv.org/abs/2204.13902, equation 15.
    """
    if deis_mode != "tab":
        raise ValueError(f"unknown deis_mode {deis_mode!r}; known: tab")
    run = Trajectory(model, sigmas, extra_args, callback, disable, distinct=True)
    levels = run.sigmas.cpu()
    times, fine_times = _deis_times(levels), _deis_times(levels.double())

    def weights(place: int, order: int) -> list[float]:
        if order == 1:
            return [run.levels[place + 1] - run.levels[place]]
        found = _deis_weights(times, place, order)
        # Where single precision cannot tell two times apart, or one from zero.
        if not bool(found.isfinite().all()):
            found = _deis_weights(fine_times, place, order)
        weights: list[float] = found.tolist()
        return weights

    def step(x: Tensor, slopes: list[Tensor]) -> Tensor:
        for slope, weight in zip(slopes, weights(run.index, len(slopes))):
            x = x + slope * weight
        return x

    return _integrate(run, x, step, max_order)
