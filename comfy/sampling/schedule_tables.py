"""Schedules that were found by optimisation, as their authors published them.

Each row runs from the highest level to the lowest; other step counts are interpolated between its
entries in log sigma. The GITS rows are percentages of the timesteps of Stable Diffusion's table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from comfy.sampling.noise_levels import ModelSamplingDiscrete

# fmt: off
# Sabour et al. 2024, https://research.nvidia.com/labs/toronto-ai/AlignYourSteps, ten steps each.
ALIGN_YOUR_STEPS = {
    "SD1": [14.6146412293, 6.4745760956, 3.8636745985, 2.6946151520, 1.8841921177, 1.3943805092,
            0.9642583904, 0.6523686016, 0.3977456272, 0.1515232662, 0.0291671582],
    "SDXL": [14.6146412293, 6.3184485287, 3.7681790315, 2.1811480769, 1.3405244945, 0.8620721141,
             0.5550693289, 0.3798540708, 0.2332364134, 0.1114188177, 0.0291671582],
    "SVD": [700.00, 54.5, 15.886, 7.977, 4.248, 1.789, 0.981, 0.403, 0.173, 0.034, 0.002],
}

# Pei et al. 2025, Optimal Stepsize for Diffusion Sampling, https://arxiv.org/abs/2503.21774.
OPTIMAL_STEPS = {
    "FLUX": [0.9968, 0.9886, 0.9819, 0.975, 0.966, 0.9471, 0.9158, 0.8287, 0.5512, 0.2808, 0.001],
    "Wan": [1.0, 0.997, 0.995, 0.993, 0.991, 0.989, 0.987, 0.985, 0.98, 0.975, 0.973, 0.968, 0.96,
            0.946, 0.927, 0.902, 0.864, 0.776, 0.539, 0.208, 0.001],
    "Chroma": [0.992, 0.99, 0.988, 0.985, 0.982, 0.978, 0.973, 0.968, 0.961, 0.953, 0.943, 0.931,
               0.917, 0.9, 0.881, 0.858, 0.832, 0.802, 0.769, 0.731, 0.69, 0.646, 0.599, 0.55,
               0.501, 0.451, 0.402, 0.355, 0.311, 0.27, 0.232, 0.199, 0.169, 0.143, 0.12, 0.101,
               0.084, 0.07, 0.058, 0.048, 0.001],
}

# Chen et al. 2024, On the Trajectory Regularity of ODE-based Diffusion Sampling,
# https://arxiv.org/abs/2405.11326: coefficient -> steps -> percent of the timesteps done before
# each step. Rows between these are interpolated.
GITS_PERCENTS: dict[float, dict[int, list[int]]] = {
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
GITS_LONGEST = 20


def interpolate_log_linear(levels: Sequence[float], count: int) -> list[float]:
    """`count` levels over the span of a descending row, linear in log sigma between its entries."""
    if count == len(levels):
        return list(levels)
    places = np.linspace(0, 1, count)
    logs = np.interp(places, np.linspace(0, 1, len(levels)), np.log(np.asarray(levels)[::-1]))
    return np.exp(logs)[::-1].tolist()


def finish(levels: Sequence[float], steps: int, denoise: float) -> Tensor:
    """The last round(steps * denoise) steps of a row of steps + 1 levels, ending in 0."""
    if denoise <= 0:
        return torch.FloatTensor([])
    kept = steps if denoise >= 1 else round(steps * denoise)
    return torch.FloatTensor([*levels[-(kept + 1) : -1], 0.0])


def tabled_schedule(row: Sequence[float], steps: int, denoise: float = 1.0) -> Tensor:
    """A published row at any number of steps."""
    return finish(interpolate_log_linear(row, steps + 1), steps, denoise)


def _gits_row(rows: dict[int, list[int]], steps: int) -> list[float]:
    """Percents before each of `steps` steps: a published row, or one between the two around it."""
    if steps in rows:
        return [float(percent) for percent in rows[steps]]
    known = sorted(rows)
    above = known[min(bisect_left(known, steps), len(known) - 1)]
    below = max((count for count in known if count < steps), default=above)
    weight = 0.0 if above == below else (steps - below) / (above - below)
    place = np.arange(steps) / steps
    curves = [
        np.interp(place, np.arange(count + 1) / count, [*rows[count], 100])
        for count in (below, above)
    ]
    return (curves[0] * (1 - weight) + curves[1] * weight).tolist()


def gits_schedule(coefficient: float, steps: int, denoise: float = 1.0) -> Tensor:
    """Levels on a grid of whole percents; past 20 steps the longest row is interpolated.

    Args:
        coefficient: 0.8 .. 1.5; larger ones spend more steps at low noise.
    """
    sampling = ModelSamplingDiscrete()
    wanted = min(steps, GITS_LONGEST)
    known = sorted(GITS_PERCENTS)
    if not known[0] <= coefficient <= known[-1]:
        raise ValueError(f"coefficient {coefficient} is outside {known[0]} .. {known[-1]}")
    upper = known[bisect_left(known, coefficient - 1e-9)]
    lower = max((c for c in known if c <= coefficient + 1e-9), default=upper)
    weight = 0.0 if upper <= lower else (coefficient - lower) / (upper - lower)
    rows = [np.asarray(_gits_row(GITS_PERCENTS[c], wanted)) for c in (lower, upper)]
    percents = np.rint(rows[0] * (1 - weight) + rows[1] * weight)
    levels = [
        float(sampling.sigma_max) if percent == 0 else sampling.percent_to_sigma(percent / 100)
        for percent in percents.tolist()
    ]
    return tabled_schedule([*levels, float(sampling.sigma_min)], steps, denoise)
