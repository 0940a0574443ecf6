"""Reading videos with PyAV: facts, pictures and sound of a file, whole or in part."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import torch

from comfy_execution.context import check_interrupt

if TYPE_CHECKING:
    from av.container import InputContainer

    from comfy_api.latest._input.basic_types import AudioInput

logger = logging.getLogger(__name__)

MICROSECONDS = 1_000_000  # PyAV's unit for the duration of a container


@dataclass(frozen=True)
class Span:
    """A part of a video in seconds; `end` None means until the end of the file."""

    start: float = 0.0
    end: float | None = None

    def is_whole(self) -> bool:
        """Whether nothing is cut off."""
        return self.start <= 0 and self.end is None


def open_video(source: str | BytesIO) -> InputContainer:
    """Opens a path or stream for reading.

    Raises:
        ValueError: the file is no video, or holds no pictures.
    """
    if isinstance(source, BytesIO):
        source.seek(0)
    name = source if isinstance(source, str) else "stream"
    try:
        container = av.open(source, mode="r")
    except av.error.InvalidDataError as error:
        raise ValueError(f"cannot read {name} as a video: {error}") from error
    if not container.streams.video:
        container.close()
        raise ValueError(f"no pictures in {name}: the file has no video stream")
    return container


@contextmanager
def naming_source(source: str | BytesIO) -> Iterator[None]:
    """Puts the file's name on what its data make the decoder say.

    Raises:
        ValueError: In place of the media library's errors.
    """
    try:
        yield
    except av.error.FFmpegError as error:
        name = source if isinstance(source, str) else "stream"
        raise ValueError(
            f"cannot decode {name} as a video: {error}; it is damaged or of another kind: choose "
            "another one or convert it"
        ) from error


def container_seconds(container: InputContainer) -> float:
    """Length of a video in seconds, from its header, or by counting if the header has none."""
    if container.duration is not None:
        return float(container.duration) / MICROSECONDS
    stream = container.streams.video[0]
    if stream.duration is not None and stream.time_base is not None:
        return float(stream.duration * stream.time_base)
    rate = stream.average_rate or Fraction(1)
    return float(count_frames(container) / rate)


def count_frames(container: InputContainer) -> int:
    """Number of pictures, from the header, or by decoding if the header has none.

    Decoding uses the container up: open it again to read from it afterwards.
    """
    stream = container.streams.video[0]
    return stream.frames or sum(1 for _ in container.decode(stream))


def frame_rate(container: InputContainer) -> Fraction:
    """Pictures per second: the average, or the guess of the media library, or 1."""
    stream = container.streams.video[0]
    return Fraction(stream.average_rate or stream.guessed_rate or 1)


def decode_images(container: InputContainer, span: Span) -> torch.Tensor:
    """The pictures of a part of a video, turned upright: `[T, H, W, 3]`, float32 in 0..1."""
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    _seek(container, stream, span.start)
    frames: list[np.ndarray[Any, Any]] = []
    for frame in container.decode(stream):
        check_interrupt()
        time = frame.time or 0.0
        if span.end is not None and time >= span.end:
            break
        if time >= span.start:
            frames.append(_upright(frame))
    if not frames:
        return torch.zeros(0, 0, 0, 3)
    images = torch.empty(len(frames), *frames[0].shape, dtype=torch.float32)
    for index in range(len(frames) - 1, -1, -1):  # each frame is freed once it is copied
        images[index] = torch.from_numpy(frames.pop())
    return images.div_(255.0)


def quarter_turns(frame: av.VideoFrame) -> int:
    """By how many quarter turns, counter-clockwise, the file wants a picture rotated."""
    return round(getattr(frame, "rotation", 0) / 90) % 4


def first_frame(container: InputContainer) -> av.VideoFrame | None:
    """The first picture of a video, None if it has none. Uses the container up."""
    return next(iter(container.decode(container.streams.video[0])), None)


def _upright(frame: av.VideoFrame) -> np.ndarray[Any, Any]:
    """A picture `[H, W, 3]` of bytes, after the rotation that the file asks for."""
    pixels: np.ndarray[Any, Any] = frame.to_ndarray(format="rgb24")
    turns = quarter_turns(frame)
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def _seek(container: InputContainer, stream: Any, seconds: float) -> None:
    """Moves to the last key frame not after a time."""
    if seconds > 0:
        container.seek(int(seconds / stream.time_base), stream=stream)


def decode_audio(container: InputContainer, span: Span) -> AudioInput | None:
    """The sound of a part of a video as `waveform` `[1, C, samples]`; None if there is none."""
    if not container.streams.audio:
        return None
    stream = container.streams.audio[0]
    _seek(container, stream, span.start)
    resampler = av.AudioResampler(format="fltp")
    rate = int(stream.sample_rate)
    chunks: list[np.ndarray[Any, Any]] = []
    first_time: float | None = None
    for decoded in container.decode(stream):
        check_interrupt()
        time = decoded.time or 0.0
        if span.end is not None and time >= span.end:
            break
        if time + decoded.samples / rate <= span.start:
            continue
        first_time = time if first_time is None else first_time
        chunks += [frame.to_ndarray() for frame in resampler.resample(decoded)]
    if not chunks or first_time is None:
        return None
    waveform = np.concatenate(chunks, axis=1)
    skip = max(0, round((span.start - first_time) * rate))
    stop = None if span.end is None else skip + round((span.end - span.start) * rate)
    return {"waveform": torch.from_numpy(waveform[:, skip:stop].copy())[None], "sample_rate": rate}
