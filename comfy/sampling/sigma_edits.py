"""Editing levels of noise, as the sigma nodes do. Inputs, tensors or lists, are never changed."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from comfy import progress
from comfy.sampling.checks import levels_of

logger = logging.getLogger(__name__)

NUMBER = re.compile(r"[-+]?(?:\d+(?:\.+\d+)?|(?<!\.)\.+\d+)")
"""A decimal number; each letter of a text is looked at a few times only, whatever it is."""

# A flipped schedule that ended clean starts this far above zero: zero has no logarithm.
FLIPPED_ZERO = 0.0001


def split_at_step(sigmas: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Levels up to and from a step; both contain the level between them."""
    sigmas = levels_of(sigmas)
    return sigmas[: step + 1], sigmas[step:]


def split_at_denoise(sigmas: Tensor, denoise: float) -> tuple[Tensor, Tensor]:
    """Levels before and of the last round(steps * denoise) steps."""
    sigmas = levels_of(sigmas)
    kept = round(max(len(sigmas) - 1, 0) * denoise)
    return sigmas[:-kept] if kept else sigmas[:0], sigmas[-(kept + 1) :]


def flip(sigmas: Tensor) -> Tensor:
    """Levels in ascending order, for running an ODE towards noise."""
    flipped = levels_of(sigmas).flip(0)
    if len(flipped) and flipped[0] == 0:
        flipped[0] = FLIPPED_ZERO
    return flipped


def with_first(sigmas: Tensor, sigma: float) -> Tensor:
    """Levels with another first one."""
    changed = levels_of(sigmas).clone()
    changed[:1] = sigma
    return changed


SPACINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: x,
    "cosine": lambda x: torch.sin(x * math.pi / 2),
    "sine": lambda x: 1 - torch.cos(x * math.pi / 2),
}


def extend(
    sigmas: Tensor, steps: int, start_at_sigma: float, end_at_sigma: float, spacing: str
) -> Tensor:
    """Divide each step that starts between two levels into `steps` steps.

    Args:
        start_at_sigma: Highest level from which a step is divided; negative for no limit.
        end_at_sigma: Lowest level from which a step is divided.
        spacing: A name of `SPACINGS`.
    """
    if spacing not in SPACINGS:
        raise ValueError(f"unknown spacing {spacing!r}; known: {', '.join(SPACINGS)}")
    sigmas = levels_of(sigmas)
    highest = math.inf if start_at_sigma < 0 else start_at_sigma
    places = SPACINGS[spacing](torch.linspace(0, 1, steps + 1, device=sigmas.device)[1:-1])
    levels: list[float] = []
    for current, following in pairwise(sigmas):
        levels.append(float(current))
        if end_at_sigma <= current <= highest:
            levels += (places * (following - current) + current).tolist()
    if len(sigmas):
        levels.append(float(sigmas[-1]))
    return torch.FloatTensor(levels)


def parse(text: str) -> Tensor:
    """All decimal numbers of a text, in order; anything between them separates.

    Words among them (`inf`, `1e-3`) are said on the node, with what was read.
    """
    levels = [float(number) for number in NUMBER.findall(text)]
    words = re.findall(r"[^\W\d_]+", text)
    if words:
        progress.warn(
            logger, "%s in the sigmas %r is no number; read as %s: write decimal numbers, as 0.001",
            ", ".join(map(repr, words[:3])), text[:200], levels,
        )  # fmt: skip
    return torch.FloatTensor(levels)
