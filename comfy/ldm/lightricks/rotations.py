"""Turns of channels by the place of a token, which LTX video tells attention with.

Places are shares of a largest one, -1..1; each axis has waves of its own. Either neighbouring
channels turn together, or the halves of each head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

THETA = 10000.0
FLAT_AXES = 3  # of tokens whose heads are not apart
Turn = tuple[Tensor, Tensor, bool]
"""Cosines, sines, and whether halves turn: ``[B, N, D]`` for neighbours, for halves
``[B, heads, N, D / heads / 2]``."""


class LTXRopeType(str, Enum):
    """Which channels turn together: neighbours, or the halves of each head."""

    INTERLEAVED = "interleaved"
    SPLIT = "split"

    @classmethod
    def from_dict(
        cls, kwargs: Mapping[str, Any], default: LTXRopeType | None = None
    ) -> LTXRopeType:
        """The entry ``rope_type`` of a configuration.

        Raises:
            ValueError: There is no such kind of turn.
        """
        return cls(kwargs.get("rope_type", default or cls.INTERLEAVED))


class LTXFrequenciesPrecision(str, Enum):
    """Type in which lengths of waves are computed."""

    FLOAT32 = "float32"
    FLOAT64 = "float64"

    @classmethod
    def from_dict(
        cls, kwargs: Mapping[str, Any], default: LTXFrequenciesPrecision | None = None
    ) -> LTXFrequenciesPrecision:
        """The entry ``frequencies_precision`` of a configuration.

        Raises:
            ValueError: There is no such type.
        """
        return cls(kwargs.get("frequencies_precision", default or cls.FLOAT32))


def waves(theta: float, axes: int, dim: int, powers: torch.dtype, device: Any = None) -> Tensor:
    """Waves ``[dim / 2 / axes]`` in a half turn of a place of each axis, from one to `theta`."""
    exponents = torch.linspace(0, 1, dim // (2 * axes), device=device, dtype=powers)
    return (theta**exponents * (math.pi / 2)).float()


def generate_freq_grid_np(
    positional_embedding_theta: float,
    positional_embedding_max_pos_count: int,
    inner_dim: int,
    _: Any = None,
) -> Tensor:
    """The waves of each of some axes, computed in float64, as custom nodes call for them."""
    axes = positional_embedding_max_pos_count
    return waves(positional_embedding_theta, axes, inner_dim, torch.float64)


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
    around = shares.transpose(1, 2)[..., None] * 2 - 1  # [B, N, axes, 1]
    made = waves(THETA, axes, dim, powers, device) * around
    made = made.transpose(-1, -2).flatten(2)
    return F.pad(made, (dim // 2 - made.shape[-1], 0))


def interleaved_freqs_cis(freqs: Tensor, pad_size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[B, N, D]`` of neighbours, of angles ``[B, N, (D - pad) / 2]``.

    Args:
        pad_size: Channels in front that do not turn.
    """
    pad = (pad_size, 0)
    cosines, sines = (one.repeat_interleave(2, dim=-1) for one in (freqs.cos(), freqs.sin()))
    return F.pad(cosines, pad, value=1), F.pad(sines, pad)


def split_freqs_cis(
    freqs: Tensor, pad_size: int, num_attention_heads: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[B, heads, N, D / heads / 2]`` of the halves of each head, of angles
    ``[B, N, D / 2 - pad]``.

    Args:
        pad_size: Pairs in front that do not turn.
    """
    pad, heads = (pad_size, 0), (num_attention_heads, -1)
    padded = F.pad(freqs.cos(), pad, value=1), F.pad(freqs.sin(), pad)
    cosines, sines = (one.unflatten(-1, heads).transpose(1, 2) for one in padded)
    return cosines, sines


def neighbours(angles: Tensor, dtype: torch.dtype) -> Turn:
    """The turn of channels 0 and 1, 2 and 3, ..."""
    cosines, sines = interleaved_freqs_cis(angles, 0)
    return cosines.to(dtype), sines.to(dtype), False


def halves(angles: Tensor, heads: int, dtype: torch.dtype) -> Turn:
    """The turn of the halves of each head."""
    cosines, sines = split_freqs_cis(angles, 0, heads)
    return cosines.to(dtype), sines.to(dtype), True


def apply_rotary_emb(input_tensor: Tensor, freqs_cis: Turn | tuple[Tensor, Tensor]) -> Tensor:
    """Turn channels of ``[B, N, D]``, or of heads ``[B, heads, N, D / heads]``.

    Args:
        freqs_cis: A turn; of neighbours where nothing says which.
    """
    x, (cosines, sines, *kinds) = input_tensor, freqs_cis
    if not (kinds and kinds[0]):
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
        return x * cosines + torch.stack([-second, first], dim=-1).flatten(-2) * sines
    is_flat = x.ndim == FLAT_AXES
    if is_flat:
        x = x.unflatten(-1, (cosines.shape[1], -1)).transpose(1, 2)
    first, second = x.chunk(2, dim=-1)
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    out = torch.cat(turned, dim=-1)
    return out.transpose(1, 2).flatten(2) if is_flat else out
