"""The vocoder of ACE-Step: from the log-mel spectrogram of a sound to the sound itself.

A ConvNeXt over the spectra, and HiFi-GAN with SiLU behind it.
Source: Kong et al. 2020, https://arxiv.org/abs/2010.05646; Liu et al. 2022,
https://arxiv.org/abs/2201.03545; https://github.com/fishaudio/vocoder.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NORM_EPS = 1e-6
STEM_KERNEL = 7


@dataclass(frozen=True)
class VocoderSizes:
    """Sizes of one vocoder.

    Attributes:
        bands: Of a spectrum.
        depths, widths: Blocks and channels of each stage over the spectra.
        kernel: Of their convolutions.
        inner: Channels inside a block for each it is given.
        width: Channels behind the head's first convolution; each level halves them.
        rates, kernels: How many times longer each level makes what it gets, and by which kernel.
        block_kernels, dilations: Of the residual blocks, whose mean a level gives.
        first_kernel, last_kernel: Of the head's first and last convolution.
    """

    bands: int = 128
    depths: tuple[int, ...] = (3, 3, 9, 3)
    widths: tuple[int, ...] = (128, 256, 384, 512)
    kernel: int = 7
    inner: int = 4
    width: int = 1024
    rates: tuple[int, ...] = (4, 4, 2, 2, 2, 2, 2)
    kernels: tuple[int, ...] = (8, 8, 4, 4, 4, 4, 4)
    block_kernels: tuple[int, ...] = (3, 7, 11, 13)
    dilations: tuple[int, ...] = (1, 3, 5)
    first_kernel: int = 13
    last_kernel: int = 13


class ChannelNorm(nn.Module):
    """A layer norm over the channels of ``x [B, C, L]``."""

    def __init__(self, width: int, **place: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, **place))
        self.bias = nn.Parameter(torch.empty(width, **place))

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.weight.to(x), self.bias.to(x), NORM_EPS)
        return F.layer_norm(x.transpose(1, 2), x.shape[1:2], *parts).transpose(1, 2)


class ConvNeXtBlock(nn.Module):
    """A convolution of each channel, a feed-forward of each spectrum, and what it is given."""

    def __init__(self, width: int, sizes: VocoderSizes, operations: Any, **place: Any) -> None:
        super().__init__()
        kernel, inner = sizes.kernel, sizes.inner * width
        self.dwconv = operations.Conv1d(
            width, width, kernel, padding=kernel // 2, groups=width, **place
        )
        self.norm = operations.LayerNorm(width, eps=NORM_EPS, **place)
        self.pwconv1 = operations.Linear(width, inner, **place)
        self.pwconv2 = operations.Linear(inner, width, **place)
        self.gamma = nn.Parameter(torch.empty(width, **place))

    def forward(self, x: Tensor) -> Tensor:
        made = self.norm(self.dwconv(x).transpose(1, 2))
        made = self.pwconv2(F.gelu(self.pwconv1(made))) * self.gamma.to(x)
        return x + made.transpose(1, 2)


class Backbone(nn.Module):
    """Stages of ConvNeXt blocks over spectra ``[B, bands, L]``."""

    def __init__(self, sizes: VocoderSizes, operations: Any, **place: Any) -> None:
        super().__init__()
        conv, widths = operations.Conv1d, sizes.widths
        stem = conv(
            sizes.bands, widths[0], STEM_KERNEL, padding=STEM_KERNEL // 2,
            padding_mode="replicate", **place,
        )  # fmt: skip
        self.channel_layers = nn.ModuleList([nn.Sequential(stem, ChannelNorm(widths[0], **place))])
        self.channel_layers.extend(
            nn.Sequential(ChannelNorm(width, **place), conv(width, wider, 1, **place))
            for width, wider in itertools.pairwise(widths)
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvNeXtBlock(width, sizes, operations, **place) for _ in range(depth)))
            for width, depth in zip(widths, sizes.depths)
        )
        self.norm = ChannelNorm(widths[-1], **place)

    def forward(self, x: Tensor) -> Tensor:
        for widen, stage in zip(self.channel_layers, self.stages):
            x = stage(widen(x))
        return self.norm(x)


class ResBlock(nn.Module):
    """Pairs of a dilated and a plain convolution, each pair with a residual connection."""

    def __init__(
        self, width: int, kernel: int, dilations: tuple[int, ...], operations: Any, **place: Any
    ) -> None:
        super().__init__()
        conv, reach = operations.Conv1d, kernel // 2
        self.convs1 = nn.ModuleList(
            conv(width, width, kernel, padding=reach * apart, dilation=apart, **place)
            for apart in dilations
        )
        self.convs2 = nn.ModuleList(
            conv(width, width, kernel, padding=reach, **place) for _ in dilations
        )

    def forward(self, x: Tensor) -> Tensor:
        for dilated, plain in zip(self.convs1, self.convs2):
            x = x + plain(F.silu(dilated(F.silu(x))))
        return x


class Head(nn.Module):
    """States ``[B, D, L]`` to samples ``[B, 1, L * product of the rates]`` in -1..1."""

    def __init__(self, sizes: VocoderSizes, operations: Any, **place: Any) -> None:
        super().__init__()
        conv, width = operations.Conv1d, sizes.width
        first, last = sizes.first_kernel, sizes.last_kernel
        self.conv_pre = conv(sizes.widths[-1], width, first, padding=first // 2, **place)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for rate, kernel in zip(sizes.rates, sizes.kernels):
            width //= 2
            longer = operations.ConvTranspose1d(
                2 * width, width, kernel, stride=rate, padding=(kernel - rate) // 2, **place
            )
            self.ups.append(longer)
            self.resblocks.extend(
                ResBlock(width, reach, sizes.dilations, operations, **place)
                for reach in sizes.block_kernels
            )
        self.conv_post = conv(width, 1, last, padding=last // 2, **place)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_pre(x)
        count = len(self.resblocks) // len(self.ups)
        for level, longer in enumerate(self.ups):
            x = longer(F.silu(x))
            blocks = self.resblocks[level * count : (level + 1) * count]
            total = blocks[0](x)
            for block in blocks[1:]:
                total = total + block(x)
            x = total / count
        return self.conv_post(F.silu(x)).tanh()


class Vocoder(nn.Module):
    """Log-mel spectra ``[B, bands, L]`` to sounds ``[B, 1, samples]``."""

    def __init__(self, sizes: VocoderSizes, operations: Any, **place: Any) -> None:
        super().__init__()
        self.backbone = Backbone(sizes, operations, **place)
        self.head = Head(sizes, operations, **place)

    def forward(self, spectra: Tensor) -> Tensor:
        return self.head(self.backbone(spectra))
