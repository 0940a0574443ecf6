"""What reads the lyrics of ACE-Step: a transformer whose attention knows the distance of tokens.

A Conformer without convolutions and without the first of its two feed-forwards.
Source: Gong et al. 2025, https://arxiv.org/abs/2506.00045; Gulati et al. 2020,
https://arxiv.org/abs/2005.08100; Dai et al. 2019, https://arxiv.org/abs/1901.02860, appendix B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy.devices import memory

PERIOD = 10000.0
SCORE_COPIES = 5  # of scores, which live at once: those of distances are twice as many


@dataclass(frozen=True)
class LyricSizes:
    """Sizes of one encoder.

    Attributes:
        width: Channels of a token, given and made.
        heads, layers: Of attention; of the encoder.
        inner: Channels inside a feed-forward.
    """

    width: int = 1024
    heads: int = 16
    layers: int = 6
    inner: int = 4096


def distance_waves(length: int, width: int, device: torch.device) -> Tensor:
    """Sines and cosines, alternating, of the distances ``length - 1`` down to ``1 - length``.

    Returns:
        ``[2 * length - 1, width]``, float32.
    """
    distances = torch.arange(length - 1, -length, -1, device=device, dtype=torch.float32)
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    angles = distances[:, None] * torch.exp(steps * -(math.log(PERIOD) / width))
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def by_distance(scores: Tensor) -> Tensor:
    """Scores ``[..., L, 2 L - 1]`` of distances L - 1 down to 1 - L, as those of tokens
    ``[..., L, L]``: row i, column j is that of the distance i - j.
    """
    length = scores.shape[-2]
    # With one column more a row is two lengths long; read in rows shorter by one, each row of
    # tokens begins one distance further on.
    rows = F.pad(scores, (1, 0)).flatten(-2)[..., length:]
    return rows.unflatten(-1, (length, 2 * length - 1))[..., :length]


class DistanceAttention(nn.Module):
    """Attention that adds to what tokens say to each other what their distance says."""

    def __init__(self, width: int, heads: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.heads = heads
        self.linear_q = operations.Linear(width, width, **place)
        self.linear_k = operations.Linear(width, width, **place)
        self.linear_v = operations.Linear(width, width, **place)
        self.linear_out = operations.Linear(width, width, **place)
        self.linear_pos = operations.Linear(width, width, bias=False, **place)
        self.pos_bias_u = nn.Parameter(torch.empty(heads, width // heads, **place))
        self.pos_bias_v = nn.Parameter(torch.empty(heads, width // heads, **place))

    def _by_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def forward(self, x: Tensor, waves: Tensor) -> Tensor:
        """Tokens ``[B, L, D]`` and the waves of their distances ``[2 L - 1, D]``."""
        copies = SCORE_COPIES * self.heads
        memory.require_room_for_pairs(x.shape[1], "the lyrics", x.device, x.dtype, copies)
        q, k, v = (self._by_head(part(x)) for part in (self.linear_q, self.linear_k, self.linear_v))
        apart = self._by_head(self.linear_pos(waves))
        said = (q + self.pos_bias_u.to(q)[:, None]) @ k.transpose(-2, -1)
        far = (q + self.pos_bias_v.to(q)[:, None]) @ apart.transpose(-2, -1)
        scores = (said + by_distance(far)) / math.sqrt(q.shape[-1])
        seen = scores.softmax(dim=-1) @ v
        return self.linear_out(seen.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers."""

    def __init__(self, width: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.w_1 = operations.Linear(width, inner, **place)
        self.w_2 = operations.Linear(inner, width, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_2(F.silu(self.w_1(x)))


class EncoderLayer(nn.Module):
    """Attention and a feed-forward, each behind a norm."""

    def __init__(self, sizes: LyricSizes, operations: Any, **place: Any) -> None:
        super().__init__()
        self.self_attn = DistanceAttention(sizes.width, sizes.heads, operations, **place)
        self.feed_forward = FeedForward(sizes.width, sizes.inner, operations, **place)
        self.norm_ff = operations.LayerNorm(sizes.width, **place)
        self.norm_mha = operations.LayerNorm(sizes.width, **place)

    def forward(self, x: Tensor, waves: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm_mha(x), waves)
        return x + self.feed_forward(self.norm_ff(x))


class Embedding(nn.Module):
    """A projection with a norm, under the published keys."""

    def __init__(self, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.out = nn.Sequential(
            operations.Linear(width, width, **place), operations.LayerNorm(width, **place)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x) * math.sqrt(x.shape[-1])


class LyricEncoder(nn.Module):
    """States ``[B, L, D]`` of lyrics of the same shape."""

    def __init__(self, sizes: LyricSizes, operations: Any, **place: Any) -> None:
        super().__init__()
        self.embed = Embedding(sizes.width, operations, **place)
        self.after_norm = operations.LayerNorm(sizes.width, **place)
        self.encoders = nn.ModuleList(
            EncoderLayer(sizes, operations, **place) for _ in range(sizes.layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        waves = distance_waves(x.shape[1], x.shape[2], x.device).to(x.dtype)
        for layer in self.encoders:
            x = layer(x, waves)
        return self.after_norm(x)
