"""Oobleck, the autoencoder of Stable Audio: convolutions over the samples of a sound.

Published files hold each weight as a length and a direction; `comfy.weights.weight_norm` joins
them, so that layers here have plain weights.
Source: https://arxiv.org/abs/2407.14358; https://github.com/Stability-AI/stable-audio-tools.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops

DILATIONS = (1, 3, 9)
SMALLEST_FREQUENCY = 1e-9
SMALLEST_DEVIATION = 1e-4


class SnakeBeta(nn.Module):
    """``x + sin^2(e^a x) / e^b`` with ``a`` and ``b`` of each channel.

    Source: https://arxiv.org/abs/2006.08195.
    """

    def __init__(self, channels: int, **place: Any) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.empty(channels, **place))
        self.beta = nn.Parameter(torch.empty(channels, **place))

    def forward(self, x: Tensor) -> Tensor:
        """Of ``x [B, C, L]``."""
        alpha = self.alpha.to(x).exp()[:, None]
        beta = self.beta.to(x).exp()[:, None]
        return x + (x * alpha).sin().square() / (beta + SMALLEST_FREQUENCY)


class Layers(nn.Module):
    """Layers one after the other, under the key ``layers``."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ResidualUnit(Layers):
    """A wide convolution and one over single samples, and what it is given."""

    def __init__(self, channels: int, dilation: int, operations: Any, **place: Any) -> None:
        wide = operations.Conv1d(
            channels, channels, 7, dilation=dilation, padding=3 * dilation, **place
        )
        single = operations.Conv1d(channels, channels, 1, **place)
        super().__init__(SnakeBeta(channels, **place), wide, SnakeBeta(channels, **place), single)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def residual_units(channels: int, operations: Any, **place: Any) -> list[nn.Module]:
    """Units that look farther and farther."""
    return [ResidualUnit(channels, dilation, operations, **place) for dilation in DILATIONS]


def encoder_block(channels: int, out: int, stride: int, operations: Any, **place: Any) -> nn.Module:
    """``[B, C, L]`` to ``[B, out, L / stride]``."""
    half = math.ceil(stride / 2)
    shorter = operations.Conv1d(channels, out, 2 * stride, stride=stride, padding=half, **place)
    units = residual_units(channels, operations, **place)
    return Layers(*units, SnakeBeta(channels, **place), shorter)


def decoder_block(channels: int, out: int, stride: int, operations: Any, **place: Any) -> nn.Module:
    """``[B, C, L]`` to ``[B, out, L * stride]``."""
    half = math.ceil(stride / 2)
    longer = operations.ConvTranspose1d(
        channels, out, 2 * stride, stride=stride, padding=half, **place
    )
    return Layers(SnakeBeta(channels, **place), longer, *residual_units(out, operations, **place))


class AudioOobleckVAE(nn.Module):
    """Sound to latents and back.

    Args:
        in_channels: Of a sound.
        channels: Of the finest layers.
        latent_dim: Channels of a latent.
        c_mults, strides: Width of each level in `channels`, and by how much it is shorter.
    """

    def __init__(
        self,
        in_channels: int = 2,
        channels: int = 128,
        latent_dim: int = 64,
        c_mults: Sequence[int] = (1, 2, 4, 8, 16),
        strides: Sequence[int] = (2, 4, 4, 8, 8),
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        if len(c_mults) != len(strides):
            raise ValueError(f"{len(c_mults)} widths of levels for {len(strides)} strides")
        place = {"dtype": dtype, "device": device}
        widths = [channels * factor for factor in (1, *c_mults)]
        levels = list(zip(widths, widths[1:], strides))

        def conv(width: int, out: int, kernel: int, bias: bool = True) -> nn.Module:
            return operations.Conv1d(width, out, kernel, padding=kernel // 2, bias=bias, **place)

        down = [encoder_block(*level, operations, **place) for level in levels]
        up = [decoder_block(b, a, s, operations, **place) for a, b, s in reversed(levels)]
        self.encoder = Layers(
            conv(in_channels, widths[0], 7),
            *down,
            SnakeBeta(widths[-1], **place),
            conv(widths[-1], 2 * latent_dim, 3),
        )
        self.decoder = Layers(
            conv(latent_dim, widths[-1], 7),
            *up,
            SnakeBeta(widths[0], **place),
            conv(widths[0], in_channels, 7, bias=False),
        )

    def encode(self, x: Tensor) -> Tensor:
        """Latent ``[B, z, L / ratio]`` of a sound ``[B, C, L]`` in -1..1, drawn by torch's
        generator.
        """
        mean, spread = self.encoder(x).chunk(2, dim=1)
        deviation = functional.softplus(spread) + SMALLEST_DEVIATION
        return torch.randn_like(mean) * deviation + mean

    def decode(self, x: Tensor) -> Tensor:
        """Sound ``[B, C, L * ratio]`` of a latent."""
        return self.decoder(x)
