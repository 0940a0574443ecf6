"""Brings a sound to another rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

ZERO_CROSSINGS = 6  # of the filter, on either side
ROLL_OFF = 0.99  # pass band, as a share of the lower rate's half
MOST_TAPS = 2**21  # samples that are weighted at once, whatever the rates


def resample(waveform: Tensor, rate: int, wanted: int) -> Tensor:
    """A sound [..., samples] at another rate, by a windowed sinc filter.

    Source: Smith, Digital Audio Resampling Home Page, https://ccrma.stanford.edu/~jos/resample/.
    """
    if rate == wanted or waveform.numel() == 0:
        return waveform
    divisor = math.gcd(rate, wanted)
    step, phases = rate // divisor, wanted // divisor
    density = min(1.0, phases / step) * ROLL_OFF  # zero crossings a sample
    width = math.ceil(ZERO_CROSSINGS / density)
    taps = torch.arange(-width, width + 2, device=waveform.device)
    samples = waveform.shape[-1]
    flat = functional.pad(waveform.reshape(-1, samples), (width, width + 2))
    length = math.ceil(phases * samples / step)
    made = flat.new_empty(flat.shape[0], length)
    block = max(1, MOST_TAPS // (taps.shape[0] * flat.shape[0]))
    for first in range(0, length, block):
        numbers = torch.arange(first, min(length, first + block), device=waveform.device)
        places = numbers * step  # in samples / phases
        before, rest = places // phases, (places % phases).double() / phases
        crossings = (taps - rest[:, None]) * density
        crossings = crossings.clamp(-ZERO_CROSSINGS, ZERO_CROSSINGS)
        window = torch.cos(crossings * math.pi / ZERO_CROSSINGS / 2) ** 2
        kernels = (torch.sinc(crossings) * window * density).to(flat)
        near = flat[:, before[:, None] + taps + width]  # [rows, numbers, taps]
        made[:, first : first + block] = torch.einsum("rnt,nt->rn", near, kernels)
    return made.reshape(*waveform.shape[:-1], length)
