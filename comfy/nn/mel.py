"""The mel scale: bands of pitches as the ear tells them apart."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor


@functools.lru_cache(maxsize=8)
def mel_filters(
    bands: int, rate: int, window: int, lowest: float = 0.0, highest: float | None = None
) -> Tensor:
    """Triangles of unit area between two pitches, [window // 2 + 1, bands] in float64.

    Their corners lie evenly on Slaney's mel scale: 3 mel for 200 Hz up to 1000 Hz, from there 27
    mel for each factor of 6.4.
    Source: Slaney 1998, Auditory Toolbox, technical report 1998-010.

    Args:
        rate: Samples a second.
        window: Samples of one spectrum.
        lowest, highest: Hertz where the first triangle begins and the last ends; half the rate by
            default.
    """
    knee, mel_a_hertz, mel_a_log = 1000.0, 3 / 200, 27 / math.log(6.4)

    def mel_of(hertz: float) -> float:
        if hertz < knee:
            return hertz * mel_a_hertz
        return knee * mel_a_hertz + math.log(hertz / knee) * mel_a_log

    ends = mel_of(lowest), mel_of(rate / 2 if highest is None else highest)
    mel = torch.linspace(*ends, bands + 2, dtype=torch.float64)
    above = knee * torch.exp((mel - knee * mel_a_hertz) / mel_a_log)
    corners = torch.where(mel < knee * mel_a_hertz, mel / mel_a_hertz, above)
    low, centre, high = corners[:-2], corners[1:-1], corners[2:]
    hertz = torch.linspace(0, rate / 2, window // 2 + 1, dtype=torch.float64)[:, None]
    rising = (hertz - low) / (centre - low)
    falling = (high - hertz) / (high - centre)
    return torch.minimum(rising, falling).clamp(min=0) * 2 / (high - low)
