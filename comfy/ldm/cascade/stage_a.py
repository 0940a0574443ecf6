"""Stage A of Stable Cascade: the autoencoder between pictures and the latents of stage B.

Source: https://arxiv.org/abs/2306.00637.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.cascade.common import NORM_EPS, WIDER

COLOURS, PATCH = 3, 2


class StageABlock(nn.Module):
    """A convolution of each channel and layers over each cell, scaled by learned numbers."""

    def __init__(self, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.width = width
        conv = operations.Conv2d(width, width, 3, groups=width, **place)
        self.depthwise = nn.Sequential(nn.ReplicationPad2d(1), conv)
        self.channelwise = nn.Sequential(
            operations.Linear(width, WIDER * width, **place),
            nn.GELU(),
            operations.Linear(WIDER * width, width, **place),
        )
        self.gammas = nn.Parameter(torch.empty(6, **place))

    def _normed(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x.movedim(1, -1), (self.width,), eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift, gate, scale_cells, shift_cells, gate_cells = self.gammas.to(x)
        normed = self._normed(x).movedim(-1, 1) * (1 + scale) + shift
        x = x + self.depthwise(normed) * gate
        normed = self._normed(x) * (1 + scale_cells) + shift_cells
        return x + self.channelwise(normed).movedim(-1, 1) * gate_cells


class Codebook(nn.Module):
    """The codes of its training, kept because files carry them."""

    def __init__(self, count: int, width: int, **place: Any) -> None:
        super().__init__()
        self.codebook = nn.Embedding(count, width, **place)


class StageA(nn.Module):
    """Pictures to latents and back.

    Args:
        levels: How often sides are halved, behind patches of two pixels.
        bottleneck_blocks: Blocks of the smallest level, on the way back.
        c_hidden, c_latent: Channels of that level and of latents.
    """

    def __init__(
        self,
        levels: int = 2,
        bottleneck_blocks: int = 12,
        c_hidden: int = 384,
        c_latent: int = 4,
        codebook_size: int = 8192,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        widths = [c_hidden // 2**level for level in reversed(range(levels))]
        pixels = COLOURS * PATCH**2

        def block(width: int) -> nn.Module:
            return StageABlock(width, operations, **place)

        down: list[nn.Module] = [block(widths[0])]
        for width, out in itertools.pairwise(widths):
            down.append(operations.Conv2d(width, out, 4, stride=2, padding=1, **place))
            down.append(block(out))
        last = operations.Conv2d(c_hidden, c_latent, 1, bias=False, **place)
        down.append(nn.Sequential(last, nn.BatchNorm2d(c_latent, **place)))
        up: list[nn.Module] = [nn.Sequential(operations.Conv2d(c_latent, c_hidden, 1, **place))]
        for level in reversed(range(levels)):
            count = bottleneck_blocks if level == levels - 1 else 1
            up += [block(widths[level]) for _ in range(count)]
            if level > 0:
                sizes = (widths[level], widths[level - 1], 4)
                up.append(operations.ConvTranspose2d(*sizes, stride=2, padding=1, **place))
        self.in_block = nn.Sequential(
            nn.PixelUnshuffle(PATCH), operations.Conv2d(pixels, widths[0], 1, **place)
        )
        self.down_blocks, self.up_blocks = nn.Sequential(*down), nn.Sequential(*up)
        self.vquantizer = Codebook(codebook_size, c_latent, **place)
        self.out_block = nn.Sequential(
            operations.Conv2d(widths[0], pixels, 1, **place), nn.PixelShuffle(PATCH)
        )

    def encode(self, x: Tensor) -> Tensor:
        """Latent ``[B, z, H / ratio, W / ratio]`` of pictures ``[B, 3, H, W]`` in 0..1."""
        return self.down_blocks(self.in_block(x))

    def decode(self, x: Tensor) -> Tensor:
        """Pictures of latents."""
        return self.out_block(self.up_blocks(x))
