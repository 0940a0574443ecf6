"""UniPC: a multistep predictor whose last point becomes a corrector once its estimate is known.

In half-log-SNR a step of length h keeps ``sigma_t / sigma_s`` of x, adds the newest estimate, and
corrects by divided differences of older estimates whose weights solve a small Vandermonde system.
Written on variance-exploding levels; the update is the same in any scaling of the latent.
Source: Zhao et al. 2023, https://arxiv.org/abs/2302.04867, algorithms 5 to 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comfy.sampling.solvers.trajectory import Denoiser, StepCallback, Trajectory

MAX_ORDER = 3
# The last step goes to this level instead of to zero, where half-log-SNR is infinite. From the few
# schedules that come below it, it goes up again a little, as pictures were made; from levels that
# single precision hardly tells from clean, it goes to their half.
NEARLY_CLEAN = 0.001
HARDLY_NOISY = 2.5e-4


def _weights(distances: Sequence[float], h: float, scale: float) -> list[float]:
    """Weights of the divided differences at the given distances (in steps of length h).

    Args:
        distances: Place of each point relative to the start of the step, in steps.
        scale: B(h) of the variant.
    """
    count = len(distances)
    rows = np.vander(np.asarray(distances), count, increasing=True).T
    target, term, factorial = [], math.expm1(-h) / -h - 1, 1
    for place in range(1, count + 1):
        target.append(term * factorial / scale)
        factorial *= place + 1
        term = term / -h - 1 / factorial
    return np.linalg.solve(rows, np.asarray(target)).tolist()


class _Multistep:
    """The state of a run: levels and estimates seen, newest first."""

    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.points: list[tuple[float, Tensor]] = []

    def remember(self, sigma: float, denoised: Tensor) -> None:
        self.points = [(sigma, denoised), *self.points][:MAX_ORDER]

    def start(self, x: Tensor, sigma: float, order: int) -> _Attempt:
        return _Attempt(self, x, sigma, order)


class _Attempt:
    """A step to one level: first predicted, then possibly corrected with the estimate there."""

    def __init__(self, state: _Multistep, x: Tensor, sigma: float, order: int) -> None:
        origin, newest = state.points[0]
        self.order, self.newest = order, newest
        self.h = math.log(origin / sigma)
        self.gain = math.expm1(-self.h)
        self.scale = -self.h if state.variant == "bh1" else self.gain
        self.base = x * (sigma / origin) - newest * self.gain
        self.distances: list[float] = []
        self.differences: list[Tensor] = []
        for level, estimate in state.points[1:order]:
            distance = math.log(origin / level) / self.h
            self.distances.append(distance)
            self.differences.append((estimate - newest) / distance)

    def _combine(self, weights: Sequence[float], differences: Sequence[Tensor]) -> Tensor:
        x = self.base
        for weight, difference in zip(weights, differences):
            x = x - difference * (self.scale * weight)
        return x

    def predict(self) -> Tensor:
        if self.order == 1:
            return self.base
        if self.order == 2:  # the paper's choice, independent of h
            weights: Sequence[float] = [0.5]
        else:
            weights = _weights(self.distances, self.h, self.scale)
        return self._combine(weights, self.differences)

    def correct(self, denoised: Tensor) -> Tensor:
        if self.order == 1:
            weights: Sequence[float] = [0.5]
        else:
            weights = _weights([*self.distances, 1.0], self.h, self.scale)
        return self._combine(weights, [*self.differences, denoised - self.newest])


def _single_precision_levels(sigmas: Tensor) -> list[float]:
    """Levels as they come back from the unit-variance form in float32.

    The published implementation keeps ``alpha = 1 / sqrt(1 + sigma^2)`` and ``sqrt(1 - alpha^2)``
    in single precision, where levels near 0.001 lose digits; pictures depend on it. Levels so low
    that they would become equal or zero are taken as they are.
    """
    log_alpha = 0.5 * torch.log(1 / (sigmas.float().cpu() ** 2 + 1))
    log_deviation = torch.log(torch.sqrt(1 - torch.exp(2 * log_alpha)))
    levels: list[float] = torch.exp(log_deviation - log_alpha).tolist()
    distinct = all(after != before for before, after in pairwise(levels)) and min(levels) > 0
    return levels if distinct else sigmas.tolist()


def _sample(run: Trajectory, x: Tensor, sigmas: Tensor, variant: str) -> Tensor:
    if run.steps < 1:
        return x
    ends = run.sigmas.clone()
    if run.levels[-1] == 0:
        # In place: whoever unmixes the result has to know the level that was really reached.
        before = run.levels[-2]
        sigmas[-1] = ends[-1] = NEARLY_CLEAN if before > HARDLY_NOISY else before / 2
    levels = _single_precision_levels(ends)
    order = max(1, min(MAX_ORDER, run.steps - 1))
    state = _Multistep(variant)
    for sigma, _ in run:
        step = run.index
        if step > 0:
            attempt = state.start(x, levels[step], min(order, step, run.steps + 1 - step))
            denoised = run.denoise(attempt.predict(), sigma, report=False)
            x = attempt.correct(denoised)
        else:
            denoised = run.denoise(x, sigma, report=False)
        run.report(x, denoised)
        state.remember(levels[step], denoised)
    return state.start(x, levels[-1], 1).predict()


@torch.no_grad()
def sample_unipc(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
    variant: str = "bh1",
) -> Tensor:
    """UniPC of order up to three.

    Args:
        sigmas: A last level of 0 is changed to the level the run really ends at.
        variant: "bh1" for B(h) = h, "bh2" for e^h - 1.
    """
    if variant not in ("bh1", "bh2"):
        raise ValueError(f"unknown variant {variant!r}; known: bh1, bh2")
    run = Trajectory(model, sigmas, extra_args, callback, disable, distinct=True)
    return _sample(run, x, sigmas, variant)


@torch.no_grad()
def sample_unipc_bh2(
    model: Denoiser,
    x: Tensor,
    sigmas: Tensor,
    extra_args: dict[str, Any] | None = None,
    callback: StepCallback | None = None,
    disable: bool | None = None,
) -> Tensor:
    """UniPC with B(h) = e^h - 1."""
    return sample_unipc(model, x, sigmas, extra_args, callback, disable, variant="bh2")
