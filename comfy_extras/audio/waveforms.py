"""Reads sounds, and brings them to one rate, length and number of channels.

A sound is `waveform` [B, C, samples] in -1..1 and `sample_rate` in hertz.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comfy.audio_encoders.resampling import resample as resample

Audio = dict[str, Any]


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


def at_one_rate(first: Audio, second: Audio) -> tuple[Tensor, Tensor, int]:
    """Two waveforms at the higher of their rates, and that rate."""
    rate = max(first["sample_rate"], second["sample_rate"])
    waveforms = [resample(one["waveform"], one["sample_rate"], rate) for one in (first, second)]
    return waveforms[0], waveforms[1], rate


def stereo(waveform: Tensor) -> Tensor:
    """A waveform with two channels, if it has one."""
    return waveform.repeat(1, 2, 1) if waveform.shape[1] == 1 else waveform
