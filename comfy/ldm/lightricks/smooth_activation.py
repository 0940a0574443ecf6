"""Activations of sounds that do not fold high pitches down: they act at twice the rate.

A sound is made twice as long, goes through the activation, and is halved again behind a filter that
takes away what half the rate cannot hold. The filters are weights of the file. Keys follow the
published files: ``upsample.filter``, ``act.alpha``, ``downsample.lowpass.filter``.
Source: Lee et al. 2022 (BigVGAN), https://arxiv.org/abs/2206.04658, section 3.2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy.ldm.audio.autoencoder import SnakeBeta

TIMES = 2  # the rate
TAPS = 12  # of both filters
ZEROS, ROLLOFF = 6, 0.99  # of `between_samples`: crossings of zero on a side, share of the band


class Longer(nn.Module):
    """Twice as many samples."""

    def __init__(self, place: dict[str, Any]) -> None:
        super().__init__()
        self.register_buffer("filter", torch.empty(1, 1, TAPS, **place))

    def forward(self, x: Tensor) -> Tensor:
        reach = TAPS // TIMES - 1
        return stretched(x, self.get_buffer("filter"), TIMES, reach, (TAPS - TIMES) // 2)


class Lowpass(nn.Module):
    """Every second sample of what a filter leaves."""

    def __init__(self, place: dict[str, Any]) -> None:
        super().__init__()
        self.register_buffer("filter", torch.empty(1, 1, TAPS, **place))

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        x = F.pad(x, (TAPS // 2 - 1, TAPS // 2), mode="replicate")
        taps = self.get_buffer("filter").to(x).expand(channels, -1, -1)
        return F.conv1d(x, taps, stride=TIMES, groups=channels)


class SmoothSnake(nn.Module):
    """A snake of each channel of ``[B, C, L]``, at twice the rate."""

    def __init__(self, channels: int, place: dict[str, Any]) -> None:
        super().__init__()
        self.act = SnakeBeta(channels, **place)
        self.upsample = Longer(place)
        self.downsample = nn.ModuleDict({"lowpass": Lowpass(place)})

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.downsample["lowpass"](self.act(self.upsample(x)))
        return made


def stretched(x: Tensor, taps: Tensor, times: int, reach: int, lead: int) -> Tensor:
    """``[B, C, L * times]`` of a sound whose ends go on as they are.

    Args:
        taps: Filter ``[1, 1, taps]`` of the longer sound, whose values sum up to 1.
        reach: Samples that are added at both ends.
        lead: Samples by which the filter delays, beside those that were added.
    """
    channels, samples = x.shape[1], x.shape[2] * times
    x = F.pad(x, (reach, reach), mode="replicate")
    kernel = taps.to(x).expand(channels, -1, -1)
    made = times * F.conv_transpose1d(x, kernel, stride=times, groups=channels)
    first = reach * times + lead
    return made[..., first : first + samples]


def at_rate(x: Tensor, times: int) -> Tensor:
    """A sound ``[B, C, L]`` at a rate some times as high: a sinc under a Hann window."""
    reach = math.ceil(ZEROS / ROLLOFF)
    places = torch.arange(2 * reach * times + 1, device=x.device, dtype=torch.float32)
    places = (places / times - reach) * ROLLOFF
    window = (places.clamp(-ZEROS, ZEROS) * (math.pi / ZEROS / 2)).cos().square()
    taps = places.sinc() * window * (ROLLOFF / times)
    return stretched(x, taps[None, None], times, reach, reach * times)
