"""Videos from a file or from parts. Torch and av are imported when a video is read or written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from fractions import Fraction
from io import BytesIO
from typing import TYPE_CHECKING, Any

from comfy_api.latest._input.video_types import VideoInput
from comfy_api.latest._util.video_types import VideoCodec, VideoComponents, VideoContainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from av.container import InputContainer

    from comfy_api.latest._input_impl.video_decoding import Span


class VideoFromFile(VideoInput):
    """A video file, read only when its contents are asked for.

    Args:
        file: Path, or the file's content as a stream.
        start_time: Seconds cut off at the start; counted from the end if negative.
        duration: Seconds kept after that; 0 for all.
    """

    def __init__(self, file: str | BytesIO, *, start_time: float = 0, duration: float = 0) -> None:
        if duration < 0:
            raise ValueError(f"video duration is {duration} s; expected 0 (all) or more")
        self._file = file
        self._start_time = start_time
        self._duration = duration

    @contextmanager
    def _open(self) -> Iterator[InputContainer]:
        from comfy_api.latest._input_impl.video_decoding import naming_source, open_video

        with open_video(self._file) as container, naming_source(self._file):
            yield container

    def _span(self, container: InputContainer) -> Span:
        """Start and end of the part this object stands for."""
        from comfy_api.latest._input_impl.video_decoding import Span, container_seconds

        start = self._start_time
        if start < 0:
            start = max(0.0, container_seconds(container) + start)
        return Span(start, start + self._duration if self._duration else None)

    def _is_whole(self) -> bool:
        return self._start_time == 0 and self._duration == 0

    def get_stream_source(self) -> str | BytesIO:
        """The file itself, or for a part of it a stream with that part."""
        if not self._is_whole():
            return super().get_stream_source()
        if isinstance(self._file, BytesIO):
            self._file.seek(0)
        return self._file

    def get_dimensions(self) -> tuple[int, int]:
        with self._open() as container:
            stream = container.streams.video[0]
            width, height = stream.width, stream.height
        return (height, width) if self._quarter_turns() % 2 else (width, height)

    def _quarter_turns(self) -> int:
        """The rotation that players apply, in quarter turns."""
        from comfy_api.latest._input_impl.video_decoding import first_frame, quarter_turns

        with self._open() as container:
            frame = first_frame(container)
            return quarter_turns(frame) if frame is not None else 0

    def get_duration(self) -> float:
        from comfy_api.latest._input_impl.video_decoding import container_seconds

        with self._open() as container:
            whole = container_seconds(container)
            span = self._span(container)
        end = whole if span.end is None else min(whole, span.end)
        return max(0.0, end - span.start)

    def get_frame_rate(self) -> Fraction:
        from comfy_api.latest._input_impl.video_decoding import frame_rate

        with self._open() as container:
            return frame_rate(container)

    def get_frame_count(self) -> int:
        from comfy_api.latest._input_impl.video_decoding import count_frames

        if not self._is_whole():
            return round(self.get_duration() * self.get_frame_rate())
        with self._open() as container:
            return count_frames(container)

    def get_container_format(self) -> str:
        with self._open() as container:
            return str(container.format.name)

    def get_components(self) -> VideoComponents:
        from comfy_api.latest._input_impl.video_decoding import (
            decode_audio,
            decode_images,
            frame_rate,
        )

        with self._open() as container:
            span = self._span(container)
            images = decode_images(container, span)
            rate = frame_rate(container)
            metadata = dict(container.metadata)
        with self._open() as container:
            audio = decode_audio(container, span)
        return VideoComponents(images, rate, audio, metadata)

    def save_to(
        self,
        path: str | BytesIO,
        format: VideoContainer = VideoContainer.AUTO,
        codec: VideoCodec = VideoCodec.AUTO,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Copies the file's streams where container and codec allow it; encodes anew otherwise."""
        from comfy_api.latest._input_impl.video_copying import can_copy, copy_streams

        if self._is_whole() and not self._quarter_turns():  # copying would lose the rotation
            with self._open() as container:
                if can_copy(container, VideoContainer(format), VideoCodec(codec)):
                    return copy_streams(container, path, metadata)
        return VideoFromComponents(self.get_components()).save_to(path, format, codec, metadata)

    def as_trimmed(
        self, start_time: float = 0, duration: float = 0, strict_duration: bool = False
    ) -> VideoFromFile | None:
        available = self.get_duration()
        start = start_time if start_time >= 0 else max(0.0, available + start_time)
        left = available - start
        if left <= 0 or (strict_duration and left < duration):
            return None
        wanted = min(duration, left) if duration else left
        with self._open() as container:
            begin = self._span(container).start + start
        keeps_rest = not duration and not self._duration
        return VideoFromFile(self._file, start_time=begin, duration=0 if keeps_rest else wanted)


class VideoFromComponents(VideoInput):
    """A video made of pictures and sound in memory."""

    def __init__(self, components: VideoComponents) -> None:
        self._components = components

    def get_components(self) -> VideoComponents:
        return self._components

    def get_container_format(self) -> str:
        return VideoContainer.MP4.value

    def save_to(
        self,
        path: str | BytesIO,
        format: VideoContainer = VideoContainer.AUTO,
        codec: VideoCodec = VideoCodec.AUTO,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        from comfy_api.latest._input_impl.video_encoding import check_target, encode_mp4

        check_target(format, codec)
        encode_mp4(self._components, path, metadata)

    def as_trimmed(
        self, start_time: float = 0, duration: float = 0, strict_duration: bool = False
    ) -> VideoFromComponents | None:
        whole = self._components
        rate = Fraction(whole.frame_rate)
        count = whole.images.shape[0]
        first = round((start_time if start_time >= 0 else count / rate + start_time) * rate)
        first = max(0, first)
        wanted = round(duration * rate) if duration else count - first
        if first >= count or (strict_duration and first + wanted > count):
            return None
        audio = whole.audio
        if audio is not None:
            per_frame = audio["sample_rate"] / rate
            begin, end = round(first * per_frame), round((first + wanted) * per_frame)
            audio = {**audio, "waveform": audio["waveform"][..., begin:end]}
        images = whole.images[first : first + wanted]
        return VideoFromComponents(VideoComponents(images, rate, audio, whole.metadata))
