"""Nodes that cut, join and mix sounds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from comfy.devices import placement
from comfy_api.latest import io
from comfy_extras.audio.waveforms import Audio, at_one_rate, stereo

LARGEST = 2**64 - 1
MOST_SAMPLES = 2**31  # of silence, 12 hours at 48 kHz


def sound(waveform: Tensor, rate: int) -> io.NodeOutput:
    """A sound as a node's output."""
    return io.NodeOutput({"waveform": waveform, "sample_rate": rate})


class EmptyAudio(io.ComfyNode):
    """Silence."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyAudio",
            display_name="Empty Audio",
            category="audio",
            inputs=[
                io.Float.Input("duration", default=60.0, min=0.0, max=LARGEST, step=0.01),
                io.Int.Input("sample_rate", default=44100, min=1, max=192000),
                io.Int.Input("channels", default=2, min=1, max=2),
            ],
            outputs=[io.Audio.Output()],
        )

    @classmethod
    def execute(cls, duration: float, sample_rate: int, channels: int) -> io.NodeOutput:
        samples = round(duration * sample_rate)
        if samples > MOST_SAMPLES:
            raise ValueError(
                f"duration: {duration:g} s at {sample_rate} Hz are {samples} samples, expected at "
                f"most {MOST_SAMPLES}; make it shorter"
            )
        device = placement.intermediate_device()
        return sound(torch.zeros(1, channels, samples, device=device), sample_rate)

    create_empty_audio = execute


class TrimAudioDuration(io.ComfyNode):
    """A part of a sound."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TrimAudioDuration",
            display_name="Trim Audio Duration",
            category="audio",
            description="Cuts out a part of a sound.",
            inputs=[
                io.Audio.Input("audio"),
                io.Float.Input(
                    "start_index",
                    default=0.0,
                    min=-LARGEST,
                    max=LARGEST,
                    step=0.01,
                    tooltip="Where it begins, in seconds; negative: from the end.",
                ),
                io.Float.Input("duration", default=60.0, min=0.0, step=0.01),
            ],
            outputs=[io.Audio.Output()],
        )

    @classmethod
    def execute(cls, audio: Audio, start_index: float, duration: float) -> io.NodeOutput:
        waveform, rate = audio["waveform"], audio["sample_rate"]
        samples = waveform.shape[-1]
        first = round(start_index * rate) + (samples if start_index < 0 else 0)
        first = max(0, first)
        last = min(samples, first + round(duration * rate))
        if first >= last:
            raise ValueError(
                f"start_index, duration: nothing lies between {start_index} s and {duration} s "
                f"later: the sound has {samples / rate:.2f} s; begin earlier or take more"
            )
        return sound(waveform[..., first:last], rate)

    trim = execute


class SplitAudioChannels(io.ComfyNode):
    """Both channels of a sound, each alone."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SplitAudioChannels",
            display_name="Split Audio Channels",
            category="audio",
            description="Takes the left and the right channel apart.",
            inputs=[io.Audio.Input("audio")],
            outputs=[io.Audio.Output(display_name=side) for side in ("left", "right")],
        )

    @classmethod
    def execute(cls, audio: Audio) -> io.NodeOutput:
        waveform, rate = audio["waveform"], audio["sample_rate"]
        if waveform.shape[1] != 2:
            raise ValueError(f"audio: expected a sound of 2 channels, found {waveform.shape[1]}")
        left, right = waveform[:, :1], waveform[:, 1:]
        return io.NodeOutput(
            {"waveform": left, "sample_rate": rate}, {"waveform": right, "sample_rate": rate}
        )

    separate = execute


class AudioConcat(io.ComfyNode):
    """One sound after the other."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AudioConcat",
            display_name="Audio Concat",
            category="audio",
            description="Joins the second sound to an end of the first.",
            inputs=[
                io.Audio.Input("audio1"),
                io.Audio.Input("audio2"),
                io.Combo.Input("direction", options=["after", "before"], default="after"),
            ],
            outputs=[io.Audio.Output()],
        )

    @classmethod
    def execute(cls, audio1: Audio, audio2: Audio, direction: str) -> io.NodeOutput:
        first, second, rate = at_one_rate(audio1, audio2)
        order = [first, second] if direction == "after" else [second, first]
        return sound(torch.cat([stereo(one) for one in order], dim=-1), rate)

    concat = execute


MERGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "mean": lambda a, b: (a + b) / 2,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
}


class AudioMerge(io.ComfyNode):
    """One sound over the other."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AudioMerge",
            display_name="Audio Merge",
            category="audio",
            description="Lays the second sound over the first, whose length counts.",
            inputs=[
                io.Audio.Input("audio1"),
                io.Audio.Input("audio2"),
                io.Combo.Input("merge_method", options=list(MERGES)),
            ],
            outputs=[io.Audio.Output()],
        )

    @classmethod
    def execute(cls, audio1: Audio, audio2: Audio, merge_method: str) -> io.NodeOutput:
        first, second, rate = at_one_rate(audio1, audio2)
        samples = first.shape[-1]
        second = functional.pad(second[..., :samples], (0, max(0, samples - second.shape[-1])))
        merged = MERGES[merge_method](first, second)
        peak = merged.abs().max() if merged.numel() else torch.tensor(0.0)
        return sound(merged / peak if peak > 1.0 else merged, rate)

    merge = execute


class AudioAdjustVolume(io.ComfyNode):
    """A louder or softer sound."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AudioAdjustVolume",
            display_name="Audio Adjust Volume",
            category="audio",
            inputs=[
                io.Audio.Input("audio"),
                io.Int.Input("volume", default=1, min=-100, max=100, tooltip="In decibels."),
            ],
            outputs=[io.Audio.Output()],
        )

    @classmethod
    def execute(cls, audio: Audio, volume: int) -> io.NodeOutput:
        return sound(audio["waveform"] * 10 ** (volume / 20), audio["sample_rate"])

    adjust_volume = execute


NODES: tuple[type[io.ComfyNode], ...] = (
    EmptyAudio,
    TrimAudioDuration,
    SplitAudioChannels,
    AudioConcat,
    AudioMerge,
    AudioAdjustVolume,
)
