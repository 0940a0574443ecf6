"""Facts about videos: containers, codecs, and the parts a video is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from comfy_api.latest.io.options import Word

if TYPE_CHECKING:
    from torch import Tensor

    from comfy_api.latest._input.basic_types import AudioInput


class VideoCodec(Word):
    """How pictures are compressed; AUTO leaves the choice to the container."""

    AUTO = "auto"
    H264 = "h264"

    @classmethod
    def as_input(cls) -> list[str]:
        """The options of a combo input."""
        return [member.value for member in cls]


class VideoContainer(Word):
    """The file format; AUTO keeps that of the source, or else takes MP4."""

    AUTO = "auto"
    MP4 = "mp4"

    @classmethod
    def as_input(cls) -> list[str]:
        """The options of a combo input."""
        return [member.value for member in cls]

    @classmethod
    def get_extension(cls, value: str | VideoContainer) -> str:
        """File name suffix without a dot; empty for a format this program does not write."""
        return "mp4" if cls(value) in (cls.MP4, cls.AUTO) else ""


@dataclass
class VideoComponents:
    """A video in parts.

    Attributes:
        images: `[T, H, W, C]`, float32 in 0..1.
        frame_rate: Pictures per second.
        audio: Sound, or None.
        metadata: Texts stored in the file, or None.
    """

    images: Tensor
    frame_rate: Fraction
    audio: AudioInput | None = None
    metadata: Mapping[str, Any] | None = None
