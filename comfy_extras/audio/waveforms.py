"""Reads sounds, and brings them to one rate, length and number of channels.

A sound is `waveform` [B, C, samples] in -1..1 and `sample_rate` in hertz.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Audio = dict[str, Any]

ZERO_CROSSINGS = 6  # of the filter, on either side
ROLL_OFF = 0.99  # pass band, as a share of the lower rate's half


def load_audio(path: str) -> Audio:
    """The first sound of a file.

    Raises:
        ValueError: The file cannot be read as sound, or holds none.
    """
    import av

    from comfy_api.latest._input_impl.video_decoding import Span, decode_audio

    try:
        with av.open(path, mode="r") as container:
            found = decode_audio(container, Span())
    except av.error.InvalidDataError as error:
        raise ValueError(f"cannot read {path} as sound: {error}") from error
    if found is None:
        raise ValueError(f"there is no sound in {path}")
    return dict(found)


def resample(waveform: Tensor, rate: int, wanted: int) -> Tensor:
    """A sound [..., samples] at another rate, by a windowed sinc filter.

    Source: Smith, Digital Audio Resampling Home Page, https://ccrma.stanford.edu/~jos/resample/.
    """
    if rate == wanted or waveform.shape[-1] == 0:
        return waveform
    divisor = math.gcd(rate, wanted)
    step, phases = rate // divisor, wanted // divisor
    cutoff = min(step, phases) * ROLL_OFF
    width = math.ceil(ZERO_CROSSINGS * step / cutoff)
    offsets = torch.arange(-width, width + step, dtype=torch.float64) / step
    starts = -torch.arange(phases, dtype=torch.float64) / phases
    place = ((starts[:, None] + offsets[None, :]) * cutoff).clamp(-ZERO_CROSSINGS, ZERO_CROSSINGS)
    window = torch.cos(place * math.pi / ZERO_CROSSINGS / 2) ** 2
    kernels = torch.sinc(place) * window * (cutoff / step)
    samples = waveform.shape[-1]
    flat = functional.pad(waveform.reshape(-1, 1, samples), (width, width + step))
    made = functional.conv1d(flat, kernels[:, None].to(flat), stride=step)
    length = math.ceil(phases * samples / step)
    return made.transpose(1, 2).reshape(*waveform.shape[:-1], -1)[..., :length]


def at_one_rate(first: Audio, second: Audio) -> tuple[Tensor, Tensor, int]:
    """Two waveforms at the higher of their rates, and that rate."""
    rate = max(first["sample_rate"], second["sample_rate"])
    waveforms = [resample(one["waveform"], one["sample_rate"], rate) for one in (first, second)]
    return waveforms[0], waveforms[1], rate


def stereo(waveform: Tensor) -> Tensor:
    """A waveform with two channels, if it has one."""
    return waveform.repeat(1, 2, 1) if waveform.shape[1] == 1 else waveform
