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
MOST_TAPS = 2**21  # samples that are weighted at once, whatever the rates


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
    except av.error.FFmpegError as error:
        raise ValueError(f"cannot read {path} as sound: {error}") from error
    if found is None:
        raise ValueError(f"there is no sound in {path}")
    return dict(found)


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


def at_one_rate(first: Audio, second: Audio) -> tuple[Tensor, Tensor, int]:
    """Two waveforms at the higher of their rates, and that rate."""
    rate = max(first["sample_rate"], second["sample_rate"])
    waveforms = [resample(one["waveform"], one["sample_rate"], rate) for one in (first, second)]
    return waveforms[0], waveforms[1], rate


def stereo(waveform: Tensor) -> Tensor:
    """A waveform with two channels, if it has one."""
    return waveform.repeat(1, 2, 1) if waveform.shape[1] == 1 else waveform
