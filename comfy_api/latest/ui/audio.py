"""Saving sounds: FLAC, MP3 and Opus, with the prompt in the file's tags."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy_api.internal.watched_file import partial_file
from comfy_api.latest.io.options import FolderType
from comfy_api.latest.ui.images import NodeClass, folder_of
from comfy_api.latest.ui.metadata import workflow_texts
from comfy_api.latest.ui.results import SavedAudios, SavedResult
from comfy_execution.context import check_interrupt

if TYPE_CHECKING:
    from av import AudioFrame
    from torch import Tensor

    from comfy_api.latest._input.basic_types import AudioInput

OPUS_RATES = (8000, 12000, 16000, 24000, 48000)  # hertz; the codec knows no others


@dataclass(frozen=True)
class AudioFormat:
    """How one kind of sound file is written: media library codec and file format, qualities."""

    codec: str
    container: str
    bit_rates: dict[str, int]  # quality -> bits per second


AUDIO_FORMATS = {
    "flac": AudioFormat("flac", "flac", {}),
    "mp3": AudioFormat("libmp3lame", "mp3", {"128k": 128_000, "320k": 320_000}),
    "opus": AudioFormat(
        "libopus",
        "ogg",
        {"64k": 64_000, "96k": 96_000, "128k": 128_000, "192k": 192_000, "320k": 320_000},
    ),
}
MP3_BEST_VARIABLE = "V0"


def opus_rate(rate: int) -> int:
    """The sample rate that Opus needs for a sound: the same or the next higher it knows."""
    return next((known for known in OPUS_RATES if known >= rate), OPUS_RATES[-1])


def write_audio(
    path: str, waveform: Tensor, rate: int, format: str, quality: str, texts: dict[str, str]
) -> None:
    """Writes one sound.

    Args:
        waveform: `[C, samples]` in -1..1; at most two channels are kept.
        rate: Samples per second.
        format: A key of `AUDIO_FORMATS`.
        quality: A bit rate such as `128k`, for MP3 also `V0`; without meaning for FLAC.
        texts: Tags.
    Raises:
        ValueError: format or quality is unknown, or the sound has no length.
    """
    import av

    if format not in AUDIO_FORMATS:
        raise ValueError(f"unknown audio format '{format}'; known: {', '.join(AUDIO_FORMATS)}")
    if waveform.shape[-1] == 0:
        raise ValueError("audio: expected a sound, found one of no length; nothing can be saved")
    target = AUDIO_FORMATS[format]
    layout = "mono" if waveform.shape[0] == 1 else "stereo"
    target_rate = opus_rate(rate) if format == "opus" else rate
    with (
        partial_file(path) as part,
        av.open(part, mode="w", format=target.container) as container,
    ):
        container.metadata.update(texts)
        stream: Any = container.add_stream(target.codec, rate=target_rate, layout=layout)
        _set_quality(stream, format, quality)
        for frame in _frames(waveform, rate, target_rate, layout, stream.format.name):
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _set_quality(stream: Any, format: str, quality: str) -> None:
    rates = AUDIO_FORMATS[format].bit_rates
    if not rates:
        return
    if format == "mp3" and quality == MP3_BEST_VARIABLE:
        stream.codec_context.options = {"q": "0"}
    elif quality in rates:
        stream.bit_rate = rates[quality]
    else:
        raise ValueError(f"unknown {format} quality '{quality}'; known: {', '.join(rates)}")


def _frames(
    waveform: Tensor, rate: int, target_rate: int, layout: str, sample_format: str
) -> Iterator[AudioFrame]:
    """The sound in the encoder's own sample format and rate."""
    import av

    samples = waveform[:2].detach().float().cpu().contiguous().numpy()
    whole = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
    whole.sample_rate = rate
    whole.pts = 0
    resampler = av.AudioResampler(format=sample_format, layout=layout, rate=target_rate)
    yield from resampler.resample(whole)
    yield from resampler.resample(None)


class AudioSaveHelper:
    """Saves sounds to one of the three folders, under counted names."""

    @staticmethod
    def save_audio(
        audio: AudioInput,
        filename_prefix: str,
        folder_type: FolderType,
        cls: NodeClass,
        format: str = "flac",
        quality: str = "128k",
    ) -> list[SavedResult]:
        """Saves each sound of a batch.

        Args:
            audio: `waveform` `[B, C, samples]` and `sample_rate`.
            cls: The node class as `execute` receives it; its prompt is stored in the files.
            format: `flac`, `mp3` or `opus`.
            quality: A bit rate such as `128k`, for MP3 also `V0`.
        """
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_of(folder_type)
        )
        texts = workflow_texts(cls)
        results = []
        for index, waveform in enumerate(audio["waveform"]):
            check_interrupt()
            file = f"{name.replace('%batch_num%', str(index))}_{counter + index:05}_.{format}"
            path = os.path.join(folder, file)
            write_audio(path, waveform, audio["sample_rate"], format, quality, texts)
            results.append(SavedResult(file, subfolder, folder_type))
        return results

    @staticmethod
    def get_save_audio_ui(
        audio: AudioInput,
        filename_prefix: str,
        cls: NodeClass,
        format: str = "flac",
        quality: str = "128k",
    ) -> SavedAudios:
        """Saves each sound of a batch in the output folder, to be shown by the node."""
        return SavedAudios(
            AudioSaveHelper.save_audio(
                audio, filename_prefix, FolderType.output, cls, format, quality
            )
        )
