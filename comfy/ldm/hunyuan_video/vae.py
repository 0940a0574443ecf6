"""The video autoencoder of HunyuanVideo: the KL autoencoder with convolutions that look back in
time only.

A latent frame stands for four frames, the first for one. Keys follow the published files.
Source: Kong et al. 2024, https://arxiv.org/abs/2412.03603.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.autoencoder.kl import DiagonalGaussianDistribution
from comfy.ldm.autoencoder.layers import (
    AutoencoderConfig,
    LayerMaker,
    Level,
    ResnetBlock,
    nonlinearity,
    through,
)
from comfy.nn import attention

HALVINGS_OF_TIME = 2
Strides = tuple[int, int, int]


class CausalConv3d(nn.Module):
    """A convolution that repeats the first frame before it, and the border around it."""

    def __init__(self, channels: int, out: int, kernel: int, stride: Any, make: LayerMaker) -> None:
        super().__init__()
        half = kernel // 2
        self.padding = (half, half, half, half, kernel - 1, 0)
        self.conv = make.operations.Conv3d(
            channels, out, kernel, stride=stride, dtype=make.dtype, device=make.device
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, self.padding, mode="replicate") if any(self.padding) else x)


@dataclass(frozen=True)
class VideoMaker(LayerMaker):
    """Makes layers over frames."""

    def conv(self, channels: int, out_channels: int, kernel: int, **options: Any) -> nn.Module:
        """A convolution that looks back in time only; its padding is its own business."""
        return CausalConv3d(channels, out_channels, kernel, options.get("stride", 1), self)


class AttnBlock(nn.Module):
    """Self-attention of each frame to itself and those before it, with a residual connection."""

    def __init__(self, width: int, make: LayerMaker) -> None:
        super().__init__()
        self.norm = make.norm(width)
        for name in ("q", "k", "v", "proj_out"):
            layer = make.operations.Conv3d(width, width, 1, dtype=make.dtype, device=make.device)
            setattr(self, name, layer)

    q: nn.Module
    k: nn.Module
    v: nn.Module
    proj_out: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).flatten(2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        cells = math.prod(x.shape[3:])
        frames = []
        for end in range(cells, q.shape[1] + 1, cells):  # a mask over all would be too large
            own = q[:, end - cells : end]
            frames.append(attention.optimized_attention(own, k[:, :end], v[:, :end], 1))
        seen = torch.cat(frames, dim=1).transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(seen)


class _Downsample(nn.Module):
    """Halve height and width, and the frames too where told."""

    def __init__(self, width: int, strides: Strides, make: VideoMaker) -> None:
        super().__init__()
        self.conv = make.conv(width, width, 3, stride=strides)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class _Upsample(nn.Module):
    """Double height and width, and all frames but the first too where told."""

    def __init__(self, width: int, strides: Strides, make: VideoMaker) -> None:
        super().__init__()
        self.strides = tuple(float(stride) for stride in strides)
        self.conv = make.conv(width, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        first = F.interpolate(x[:, :, :1], scale_factor=(1.0, *self.strides[1:]))
        if x.shape[2] == 1:
            return self.conv(first)
        rest = F.interpolate(x[:, :, 1:], scale_factor=self.strides)
        return self.conv(torch.cat([first, rest], dim=2))


class _Level(Level):
    """Residual blocks of one size, then resampling."""

    def __init__(self, channels: int, out: int, count: int, make: VideoMaker) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            ResnetBlock(in_channels=out if number else channels, out_channels=out, make=make)
            for number in range(count)
        )


class _Middle(nn.Module):
    """Residual block, attention, residual block."""

    def __init__(self, width: int, make: VideoMaker) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(in_channels=width, make=make)
        self.attn_1 = AttnBlock(width, make)
        self.block_2 = ResnetBlock(in_channels=width, make=make)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


def _strides(number: int) -> Strides:
    """How much finer level ``number`` (of the numbering of levels that are doubled, from 1 for the
    finest) is than the next: the first halvings leave the frames alone."""
    return (2 if number <= HALVINGS_OF_TIME else 1, 2, 2)


class Encoder(nn.Module):
    """Video ``[B, 3, T, H, W]`` in -1..1 to moments."""

    def __init__(self, config: AutoencoderConfig, make: VideoMaker) -> None:
        super().__init__()
        levels = len(config.ch_mult)
        self.conv_in = make.conv(config.in_channels, config.ch, 3)
        self.down = nn.ModuleList()
        channels = config.ch
        for number, mult in enumerate(config.ch_mult):
            level = _Level(channels, config.ch * mult, config.num_res_blocks, make)
            channels = config.ch * mult
            if number < levels - 1:
                level.downsample = _Downsample(channels, _strides(levels - 1 - number), make)
            self.down.append(level)
        self.mid = _Middle(channels, make)
        self.norm_out = make.norm(channels)
        self.conv_out = make.conv(channels, 2 * config.z_channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = through(self.down, self.conv_in(x))
        return self.conv_out(nonlinearity(self.norm_out(self.mid(h))))


class Decoder(nn.Module):
    """Latent to video, about -1..1."""

    def __init__(self, config: AutoencoderConfig, make: VideoMaker) -> None:
        super().__init__()
        channels = config.ch * config.ch_mult[-1]
        self.conv_in = make.conv(config.z_channels, channels, 3)
        self.mid = _Middle(channels, make)
        levels: list[nn.Module] = []
        for number in reversed(range(len(config.ch_mult))):
            width = config.ch * config.ch_mult[number]
            level = _Level(channels, width, config.num_res_blocks + 1, make)
            channels = width
            if number:
                level.upsample = _Upsample(channels, _strides(number), make)
            levels.insert(0, level)  # keys count levels from the finest
        self.up = nn.ModuleList(levels)
        self.norm_out = make.norm(channels)
        self.conv_out = make.conv(channels, config.out_ch, 3)

    def forward(self, z: Tensor) -> Tensor:
        h = through(reversed(self.up), self.mid(self.conv_in(z)))
        return self.conv_out(nonlinearity(self.norm_out(h)))


class HunyuanVideoVAE(nn.Module):
    """Encoder and decoder with 1x1 convolutions around the latent.

    Args:
        config: Sizes, of which attentions at other places are no part.
    """

    def __init__(
        self,
        config: AutoencoderConfig,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.config, place = config, {"dtype": dtype, "device": device}
        make = VideoMaker(operations, config.norm_num_groups, dtype, device)
        self.encoder, self.decoder = Encoder(config, make), Decoder(config, make)
        z = config.z_channels
        self.quant_conv = operations.Conv3d(2 * z, 2 * z, 1, **place)
        self.post_quant_conv = operations.Conv3d(z, z, 1, **place)

    def encode(self, x: Tensor) -> Tensor:
        """The mean latent ``[B, z, t, h, w]`` of a video ``[B, 3, T, H, W]`` in -1..1, of which
        frames beyond a multiple of four and one are left out."""
        frames = x.shape[2]
        step = 2**HALVINGS_OF_TIME
        x = x[:, :, : (frames - 1) // step * step + 1]
        return DiagonalGaussianDistribution(self.quant_conv(self.encoder(x))).mode()

    def decode(self, z: Tensor, **_: Any) -> Tensor:
        """Video of a latent, about -1..1."""
        return self.decoder(self.post_quant_conv(z))
