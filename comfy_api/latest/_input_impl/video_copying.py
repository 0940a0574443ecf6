"""Copying the streams of a video file into another container, without loss."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

from comfy_api.internal.watched_file import partial_file
from comfy_api.latest._input_impl.video_encoding import metadata_texts, open_mp4
from comfy_api.latest._util.video_types import VideoCodec, VideoContainer
from comfy_execution.context import check_interrupt

if TYPE_CHECKING:
    from av.container import InputContainer


def can_copy(container: InputContainer, format: VideoContainer, codec: VideoCodec) -> bool:
    """Whether a file already has the container and codec asked for.

    AUTO stands for MP4 with any codec that MP4 can hold: the suffix of saved files says so.
    """
    kept = "mp4" in container.format.name.split(",")
    name = container.streams.video[0].codec_context.name
    known = name in ("h264", "hevc", "av1", "libdav1d", "vp9", "mpeg4")
    right_codec = known if codec is VideoCodec.AUTO else name == codec.value
    return kept and right_codec and format in (VideoContainer.AUTO, VideoContainer.MP4)


def copy_streams(
    source: InputContainer, path: str | BytesIO, metadata: Mapping[str, Any] | None
) -> None:
    """Copies pictures and sound, and the stored texts with `metadata` added to them."""
    texts = {**dict(source.metadata), **metadata_texts(metadata)}
    with partial_file(path) as file, open_mp4(file) as target:
        target.metadata.update(texts)
        streams = [*source.streams.video[:1], *source.streams.audio]
        copies = {stream: target.add_stream_from_template(template=stream) for stream in streams}
        for packet in source.demux(streams):
            check_interrupt()
            if packet.dts is not None:  # the empty packets at the end only flush decoders
                packet.stream = copies[packet.stream]
                target.mux(packet)
