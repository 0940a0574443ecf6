"""What every video can do, wherever it comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from io import BytesIO
from typing import Any

from comfy_api.latest._util.video_types import VideoCodec, VideoComponents, VideoContainer


class VideoInput(ABC):
    """A value of the VIDEO type."""

    @abstractmethod
    def get_components(self) -> VideoComponents:
        """All pictures, the sound and the stored texts, in memory."""

    @abstractmethod
    def save_to(
        self,
        path: str | BytesIO,
        format: VideoContainer = VideoContainer.AUTO,
        codec: VideoCodec = VideoCodec.AUTO,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes the video to a path or stream, with further texts stored in it."""

    @abstractmethod
    def as_trimmed(
        self, start_time: float = 0, duration: float = 0, strict_duration: bool = False
    ) -> VideoInput | None:
        """A part of the video.

        Args:
            start_time: Seconds from the start; from the end if negative.
            duration: Seconds; 0 for all that follows.
            strict_duration: Whether a part shorter than `duration` counts as none.
        Returns:
            The part, or None if there is no part that long.
        """

    def get_stream_source(self) -> str | BytesIO:
        """The encoded video: a path, or a stream at its start."""
        stream = BytesIO()
        self.save_to(stream)
        stream.seek(0)
        return stream

    def get_dimensions(self) -> tuple[int, int]:
        """Width and height in pixels."""
        images = self.get_components().images
        return images.shape[2], images.shape[1]

    def get_frame_count(self) -> int:
        """How many pictures there are."""
        return int(self.get_components().images.shape[0])

    def get_frame_rate(self) -> Fraction:
        """Pictures per second."""
        return Fraction(self.get_components().frame_rate)

    def get_duration(self) -> float:
        """Length in seconds."""
        return float(self.get_frame_count() / self.get_frame_rate())

    def get_container_format(self) -> str:
        """Name of the file format, as the media library gives it."""
        import av

        with av.open(self.get_stream_source(), mode="r") as container:
            return str(container.format.name)
