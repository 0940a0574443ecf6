"""Reads sounds, and brings them to one rate, length and number of channels.

A sound is `waveform` [B, C, samples] in -1..1 and `sample_rate` in hertz.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy.audio_encoders.resampling import resample as resample
from comfy_nodes.picture_basics import check_count

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


def at_one_rate(audio1: Audio, audio2: Audio) -> tuple[Tensor, Tensor, int]:
    """Two waveforms at the higher of their rates, with as many sounds and channels, and that rate.

    One sound, and one channel, serves for all of the other's.

    Raises:
        ValueError: They have different numbers of sounds or channels otherwise.
    """
    rate = max(audio1["sample_rate"], audio2["sample_rate"])
    first, second = (
        resample(one["waveform"], one["sample_rate"], rate) for one in (audio1, audio2)
    )
    for axis, what in enumerate(("sound", "channel")):
        if first.shape[axis] > 1:
            check_count(second.shape[axis], first.shape[axis], what, "audio2", "audio1")
    counts = torch.broadcast_shapes(first.shape[:2], second.shape[:2])
    return first.expand(*counts, -1), second.expand(*counts, -1), rate


def stereo(waveform: Tensor) -> Tensor:
    """A waveform with two channels, if it has one."""
    return waveform.repeat(1, 2, 1) if waveform.shape[1] == 1 else waveform
