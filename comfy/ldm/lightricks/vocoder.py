"""HiFi-GAN: from the log-mel spectrogram of a sound to the sound itself.

That of LTX-2.3 is a BigVGAN: the same with other activations. Keys follow the published files:
``conv_pre``, ``ups.N``, ``resblocks.N.convs1.M``, ``resblocks.N.acts1.M``, ``act_post``,
``conv_post``.
Source: Kong et al. 2020, https://arxiv.org/abs/2010.05646; Lee et al. 2022,
https://arxiv.org/abs/2206.04658.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.lightricks.smooth_activation import TIMES, SmoothSnake

SLOPE, LAST_SLOPE = 0.1, 0.01  # of what is below 0
KERNEL = 7  # of the first and the last convolution
ENDS = ("tanh", "clamp", "none")


@dataclass(frozen=True)
class VocoderConfig:
    """Sizes of one vocoder.

    Attributes:
        spectrum: Bands of all channels of the spectrogram.
        width: Channels behind the first convolution; each level halves them.
        sounds: Channels of the sound.
        rates, kernels: How many times longer each level makes what it gets, and by which kernel.
        block_kernels, dilations: Of the residual blocks, whose mean a level gives.
        is_smooth: Whether activations are smooth snakes, or leave a share of what is below 0.
        last_bias: Whether the last convolution has a bias.
        end: How a sound is kept in -1..1: "tanh", "clamp", or "none" where it need not be.
    """

    spectrum: int = 128
    width: int = 1024
    sounds: int = 2
    rates: tuple[int, ...] = (6, 5, 2, 2, 2)
    kernels: tuple[int, ...] = (16, 15, 8, 4, 4)
    block_kernels: tuple[int, ...] = (3, 7, 11)
    dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5),) * 3
    is_smooth: bool = False
    last_bias: bool = True
    end: str = "tanh"

    def __post_init__(self) -> None:
        if self.end not in ENDS:
            raise ValueError(f"unknown end of a vocoder {self.end!r}; known: {', '.join(ENDS)}")
        if len(self.rates) != len(self.kernels):
            raise ValueError(
                f"a vocoder of {len(self.kernels)} levels is told {len(self.rates)} rates"
            )
        for rate, kernel in zip(self.rates, self.kernels):
            if kernel < rate or (kernel - rate) % 2:
                raise ValueError(f"a kernel of {kernel} cannot make a sound {rate} times longer")

    @property
    def samples(self) -> int:
        """Samples of the sound for each spectrum."""
        return math.prod(self.rates)

    @property
    def values(self) -> int:
        """Values of its widest layer for each spectrum."""
        lengths = itertools.accumulate(self.rates, operator.mul)
        widest = max((self.width >> n) * length for n, length in enumerate(lengths, 1))
        return widest * (TIMES if self.is_smooth else 1)


class Slope(nn.Module):
    """A share of what is below 0."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.share)


class ResBlock(nn.Module):
    """Pairs of a dilated and a plain convolution, each pair with a residual connection."""

    def __init__(
        self,
        width: int,
        kernel: int,
        dilations: tuple[int, ...],
        is_smooth: bool,
        conv: Any,
        place: dict[str, Any],
    ) -> None:
        super().__init__()
        reach = (kernel - 1) // 2
        self.convs1 = nn.ModuleList(
            conv(width, width, kernel, padding=reach * apart, dilation=apart, **place)
            for apart in dilations
        )
        self.convs2 = nn.ModuleList(
            conv(width, width, kernel, padding=reach, **place) for _ in dilations
        )
        self.acts1, self.acts2 = (
            nn.ModuleList(
                SmoothSnake(width, place) if is_smooth else Slope(SLOPE) for _ in dilations
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for *acts, dilated, plain in zip(self.acts1, self.acts2, self.convs1, self.convs2):
            x = x + plain(acts[1](dilated(acts[0](x))))
        return x


class Vocoder(nn.Module):
    """Spectrograms ``[B, C, T, bands]``, natural logarithms, to sounds ``[B, C, T * samples]`` in
    -1..1.
    """

    def __init__(
        self,
        config: VocoderConfig,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.config = config
        conv, place = operations.Conv1d, {"dtype": dtype, "device": device}
        self.conv_pre = conv(config.spectrum, config.width, KERNEL, padding=KERNEL // 2, **place)
        widths = [config.width >> level for level in range(len(config.rates) + 1)]
        self.ups = nn.ModuleList(
            operations.ConvTranspose1d(
                width, narrower, kernel, stride=rate, padding=(kernel - rate) // 2, **place
            )
            for width, narrower, kernel, rate in zip(
                widths, widths[1:], config.kernels, config.rates
            )
        )
        self.resblocks = nn.ModuleList(
            ResBlock(width, kernel, dilations, config.is_smooth, conv, place)
            for width in widths[1:]
            for kernel, dilations in zip(config.block_kernels, config.dilations)
        )
        smooth = config.is_smooth
        self.act_post = SmoothSnake(widths[-1], place) if smooth else Slope(LAST_SLOPE)
        self.conv_post = conv(
            widths[-1], config.sounds, KERNEL, padding=KERNEL // 2, bias=config.last_bias, **place
        )

    def forward(self, spectrogram: Tensor) -> Tensor:
        x = self.conv_pre(spectrogram.transpose(2, 3).flatten(1, 2))
        count = len(self.config.block_kernels)
        for level, longer in enumerate(self.ups):
            x = longer(x if self.config.is_smooth else F.leaky_relu(x, SLOPE))
            blocks = [self.resblocks[level * count + n] for n in range(count)]
            x = torch.stack([block(x) for block in blocks]).mean(dim=0)
        x = self.conv_post(self.act_post(x))
        if self.config.end == "tanh":
            return x.tanh()
        return x.clamp(-1, 1) if self.config.end == "clamp" else x
