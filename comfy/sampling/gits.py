"""Levels along which a trajectory can be followed with the least error (GITS).

Of all ways with a number of steps through a known trajectory the authors took the one whose steps
land least beside it, by dynamic programming in which the rest of the way counts `coefficient`
times, and published the ways as a table.
Source: Chen et al. 2024, On the Trajectory Regularity of ODE-based Diffusion Sampling,
https://arxiv.org/abs/2405.11326, section 4.
"""

from __future__ import annotations

from torch import Tensor

from comfy.sampling.gits_table import LEVELS, ROWS
from comfy.sampling.schedule_tables import tabled_schedule

SHORTEST, LONGEST = 2, 20
"""Steps of the table's shortest and longest rows."""

NOISE_LEVELS: dict[float, list[list[float]]] = {
    coefficient: [[LEVELS[percent] for percent in (*row, 100)] for row in rows]
    for coefficient, rows in ROWS.items()
}
"""Coefficient -> noise levels of 2, 3, ... 20 steps; custom nodes add rows of their own."""


def gits_schedule(coefficient: float, steps: int, denoise: float = 1.0) -> Tensor:
    """Levels of the published table; past 20 steps its longest row is interpolated.

    Args:
        coefficient: 0.80, 0.85, ... 1.50; larger ones spend more steps at low noise.

    Raises:
        ValueError: The table has no such coefficient, or begins at more steps.
    """
    rows = NOISE_LEVELS.get(round(coefficient, 2))
    if rows is None:
        known = ", ".join(f"{number:.2f}" for number in NOISE_LEVELS)
        raise ValueError(
            f"no GITS schedule was published for coeff {coefficient:g}; known: {known}"
        )
    if steps < SHORTEST:
        raise ValueError(f"a GITS schedule has {SHORTEST} steps at least, got {steps}")
    return tabled_schedule(rows[min(steps, LONGEST) - SHORTEST], steps, denoise)
