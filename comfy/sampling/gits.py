"""Levels along which a trajectory can be followed with the least error (GITS).

A trajectory is known at 101 levels, one for each percent of the timesteps. ``cost[i, j]`` is how
far one Euler step from level i lands beside it at level j; of all ways with a number of steps from
the first level to the last, the best one is found by dynamic programming, backwards: the rest of
the way counts `coefficient` times. The published rows of some coefficients and step counts are kept
as they are. For all others the same programme runs on costs of Gaussian data, whose spectrum was
fitted to these rows.
Source: Chen et al. 2024, On the Trajectory Regularity of ODE-based Diffusion Sampling,
https://arxiv.org/abs/2405.11326, section 4.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from torch import Tensor

from comfy.sampling.noise_levels import ModelSamplingDiscrete
from comfy.sampling.schedule_tables import tabled_schedule

Array = npt.NDArray[np.float64]

LONGEST = 20
"""Steps of the longest rows; more are interpolated."""
COEFFICIENTS = (0.8, 1.5)

# fmt: off
# coefficient -> steps -> percent of the timesteps done before each step
PERCENTS: dict[float, dict[int, list[int]]] = {
    0.8: {
        2: [0, 12],
        10: [0, 1, 2, 3, 5, 9, 12, 17, 32, 51],
        20: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 17, 21, 27, 34, 47, 71],
    },
    0.95: {
        2: [0, 14],
        10: [0, 3, 9, 12, 17, 23, 32, 45, 62, 83],
        20: [0, 1, 3, 5, 8, 10, 12, 14, 17, 20, 23, 27, 32, 38, 45, 53, 63, 74, 86, 96],
    },
    1.2: {
        2: [0, 71],
        10: [0, 17, 34, 49, 62, 73, 83, 91, 96, 99],
        20: [0, 12, 22, 32, 41, 50, 58, 66, 73, 79, 83, 87, 90, 92, 94, 95, 96, 97, 98, 99],
    },
    1.5: {
        2: [0, 81],
        10: [0, 46, 66, 79, 87, 92, 95, 97, 98, 99],
        20: [0, 38, 54, 66, 74, 80, 84, 86, 88, 89, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99],
    },
}
# fmt: on

# Variances of the data's components, how much each weighs, and the power of the distance that
# counts: with these the programme comes within 1 percent of the timesteps of the rows above in the
# mean.
VARIANCES = np.logspace(-3, 2, 9)
LOG_WEIGHTS = np.array([-1.695, 2.512, 3.687, 2.726, 0.259, 3.45, -6.606, 1.215, 0.831])
POWER = 0.936


def _percent_levels() -> Array:
    """Levels of Stable Diffusion's table at 0, 1, ... 100 percent of its timesteps."""
    sampling = ModelSamplingDiscrete()
    between = [sampling.percent_to_sigma(percent / 100) for percent in range(1, 100)]
    return np.array([float(sampling.sigma_max), *between, float(sampling.sigma_min)])


def _costs(levels: Array) -> Array:
    """[101, 101] distance beside the trajectory after one step from each level to each later one.

    A component of variance v moves along sqrt(v + sigma^2); its slope is sigma / sqrt(v + sigma^2).
    """
    place = np.sqrt(VARIANCES[:, None] + levels**2)
    slope = levels / place
    step = levels[None, :] - levels[:, None]
    beside = place[:, None, :] - place[:, :, None] - step * slope[:, :, None]
    distance = np.tensordot(np.exp(LOG_WEIGHTS), beside**2, 1) ** (POWER / 2)
    return np.where(np.tri(len(levels), dtype=bool), np.inf, distance)


@functools.lru_cache(maxsize=64)
def best_way(coefficient: float, steps: int) -> tuple[int, ...]:
    """Percents before each step of the way with the least error."""
    costs = _costs(_percent_levels())
    rest, ways = costs[:, -1], []
    for _ in range(steps - 1):
        totals = costs + coefficient * rest
        totals[:, -1] = np.inf  # a way may not end early
        ways.append(totals.argmin(axis=1))
        rest = totals.min(axis=1)
    percents = [0]
    for way in reversed(ways):
        percents.append(int(way[percents[-1]]))
    return tuple(percents)


def row(coefficient: float, steps: int) -> tuple[int, ...]:
    """Percents before each of at most 20 steps: the published ones where there are any."""
    published = PERCENTS.get(round(coefficient, 6), {})
    return tuple(published[steps]) if steps in published else best_way(coefficient, steps)


def gits_schedule(coefficient: float, steps: int, denoise: float = 1.0) -> Tensor:
    """Levels on a grid of whole percents; past 20 steps the longest row is interpolated.

    Args:
        coefficient: 0.8 .. 1.5; larger ones spend more steps at low noise.
    """
    lowest, highest = COEFFICIENTS
    if not lowest <= coefficient <= highest:
        raise ValueError(f"coefficient {coefficient} is outside {lowest} .. {highest}")
    levels = _percent_levels()
    chosen = levels[[*row(coefficient, min(steps, LONGEST)), 100]]
    return tabled_schedule(chosen.tolist(), steps, denoise)
