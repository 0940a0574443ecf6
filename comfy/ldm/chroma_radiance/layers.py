"""Layers of Chroma Radiance that work pixel by pixel: a patch is a small field over its pixels.

For every patch a linear layer makes the weights of a feed-forward, through which each pixel of that
patch goes; so one token decides how all pixels of its patch are made.
Source: Wang et al. 2025, https://arxiv.org/abs/2507.23268.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy.ldm.flux.layers import RMSNorm

MATRICES = 3  # gate, value and output of a feed-forward


def cosine_waves(side: int, count: int, like: Tensor) -> Tensor:
    """Places in a square patch, told by products of cosines ``[side * side, count * count]``.

    A pixel at ``(x, y)`` in 0..1 has ``cos(pi a x) cos(pi b y) / (1 + a b)`` for frequencies a and
    b in 0, 1, ..., count - 1, where b runs fastest; pixels are counted row by row.
    """
    line = torch.linspace(0, 1, side, device=like.device, dtype=like.dtype)
    frequencies = torch.arange(count, device=like.device, dtype=like.dtype)
    waves = torch.cos(torch.pi * line[:, None] * frequencies)
    weights = 1 / (1 + frequencies[:, None] * frequencies)
    both = waves[None, :, :, None] * waves[:, None, None, :] * weights  # row, column, a, b
    return both.reshape(side * side, count * count)


class NerfEmbedder(nn.Module):
    """A pixel's colours and its place in the patch, as a vector.

    Args:
        in_channels: Colours of a pixel.
        hidden_size_input: Width of the vector.
        max_freqs: Frequencies along each side.
        dtype: Of the weights, and what is computed in.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_size_input: int,
        max_freqs: int,
        dtype: Any = None,
        device: Any = None,
        operations: Any = None,
    ) -> None:
        super().__init__()
        self.dtype, self.max_freqs = dtype, max_freqs
        width = in_channels + max_freqs**2
        linear = operations.Linear(width, hidden_size_input, dtype=dtype, device=device)
        self.embedder = nn.Sequential(linear)

    def forward(self, pixels: Tensor) -> Tensor:
        """``[N, P * P, C]`` pixels of patches to ``[N, P * P, D]``, in the pixels' type."""
        exact = pixels.to(self.dtype or pixels.dtype)
        side = round(pixels.shape[1] ** 0.5)
        places = cosine_waves(side, self.max_freqs, exact)
        told = torch.cat([exact, places.expand(pixels.shape[0], -1, -1)], dim=-1)
        made: Tensor = self.embedder(told)
        return made.to(pixels.dtype)


class NerfGLUBlock(nn.Module):
    """A gated feed-forward over pixels whose weights are made of the patch's token.

    The columns that a pixel is multiplied with are brought to length 1.

    Args:
        hidden_size_s: Width of a token.
        hidden_size_x: Width of a pixel's vector.
        mlp_ratio: How much wider the feed-forward is inside.
    """

    compiles_alone = True

    def __init__(
        self,
        hidden_size_s: int,
        hidden_size_x: int,
        mlp_ratio: int,
        dtype: Any = None,
        device: Any = None,
        operations: Any = None,
    ) -> None:
        super().__init__()
        self.width, self.inner = hidden_size_x, hidden_size_x * mlp_ratio
        size = MATRICES * self.width * self.inner
        self.param_generator = operations.Linear(hidden_size_s, size, dtype=dtype, device=device)
        self.norm = RMSNorm(hidden_size_x, dtype=dtype, device=device)

    def forward(self, x: Tensor, s: Tensor) -> Tensor:
        """Pixels ``x [N, P * P, D]`` of patches with tokens ``s [N, S]``."""
        gate, value, out = self.param_generator(s).chunk(MATRICES, dim=-1)
        gate = F.normalize(gate.unflatten(-1, (self.width, self.inner)), dim=-2)
        value = F.normalize(value.unflatten(-1, (self.width, self.inner)), dim=-2)
        out = F.normalize(out.unflatten(-1, (self.inner, self.width)), dim=-2)
        h = self.norm(x)
        return x + (F.silu(h @ gate) * (h @ value)) @ out


class NerfFinalLayer(nn.Module):
    """A norm and a linear layer: colours of each pixel by itself."""

    def __init__(
        self,
        hidden_size: int,
        out_channels: int,
        dtype: Any = None,
        device: Any = None,
        operations: Any = None,
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, dtype=dtype, device=device)
        self.linear = operations.Linear(hidden_size, out_channels, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, D, H, W]`` to ``[B, C, H, W]``."""
        made: Tensor = self.linear(self.norm(x.movedim(1, -1))).movedim(-1, 1)
        return made


class NerfFinalLayerConv(nn.Module):
    """A norm and a convolution: colours of each pixel, by its neighbours too."""

    def __init__(
        self,
        hidden_size: int,
        out_channels: int,
        dtype: Any = None,
        device: Any = None,
        operations: Any = None,
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden_size, dtype=dtype, device=device)
        self.conv = operations.Conv2d(
            hidden_size, out_channels, 3, padding=1, dtype=dtype, device=device
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[B, D, H, W]`` to ``[B, C, H, W]``."""
        made: Tensor = self.conv(self.norm(x.movedim(1, -1)).movedim(-1, 1))
        return made
