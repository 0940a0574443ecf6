"""Turns of channels by the place of a token, which LTX video tells attention with.

Places are shares of a largest one, -1..1; each axis has waves of its own. Either neighbouring
channels turn together, or the halves of each head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

THETA = 10000.0
HEAD_AXES = 4
Turn = tuple[Tensor, Tensor]
"""Cosines and sines: ``[B, N, D]`` for neighbours, ``[B, N, heads, D / heads / 2]`` for halves."""


def angles(
    places: Tensor, largest: Sequence[float], dim: int, powers: torch.dtype = torch.float32
) -> Tensor:
    """Angles ``[B, N, dim / 2]`` of places ``[B, axes, N]``; pairs that no axis has stand first and
    do not turn.

    Args:
        largest: Place on each axis that rotations were made for.
        powers: Type in which lengths of waves are computed.
    """
    axes, device = len(largest), places.device
    shares = places.float() / torch.tensor(largest, device=device, dtype=torch.float32)[:, None]
    exponents = torch.linspace(0, 1, dim // (2 * axes), device=device, dtype=powers)
    waves = (THETA**exponents * (math.pi / 2)).float()
    made = waves * (shares.transpose(1, 2)[..., None] * 2 - 1)  # [B, N, axes, waves]
    made = made.transpose(-1, -2).flatten(2)
    return F.pad(made, (dim // 2 - made.shape[-1], 0))


def neighbours(angles: Tensor, dtype: torch.dtype) -> Turn:
    """The turn of channels 0 and 1, 2 and 3, ..."""
    angles = angles.repeat_interleave(2, dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def halves(angles: Tensor, heads: int, dtype: torch.dtype) -> Turn:
    """The turn of the halves of each head."""
    angles = angles.unflatten(-1, (heads, -1))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Turn channels of ``x [B, N, D]``."""
    cosines, sines = turn
    if cosines.ndim < HEAD_AXES:
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return x * cosines + torch.stack([-second, first], dim=-1).flatten(-2) * sines
    first, second = x.unflatten(-1, (cosines.shape[2], 2, -1)).unbind(-2)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return torch.stack(turned, dim=-2).flatten(-3)
