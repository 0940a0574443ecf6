"""Writing videos with PyAV: pictures and sound into an MP4 file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from io import BytesIO
from typing import Any

import av
import torch

from comfy_api.internal.watched_file import partial_file
from comfy_api.latest._util.video_types import VideoCodec, VideoComponents, VideoContainer
from comfy_execution.context import check_interrupt

RATE_DENOMINATOR_LIMIT = 1001  # keeps television rates such as 24000/1001 exact


def check_target(format: VideoContainer | str, codec: VideoCodec | str) -> None:
    """Raises ValueError, saying what is possible, if a container or codec cannot be written."""
    VideoContainer(format)
    VideoCodec(codec)


def metadata_texts(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Texts to store in a file: strings as they are, all else as JSON."""
    return {
        str(key): value if isinstance(value, str) else json.dumps(value)
        for key, value in (metadata or {}).items()
    }


def open_mp4(path: str | BytesIO) -> Any:
    """Opens an MP4 file or stream for writing, with room for texts under any name.

    The index of a file is moved to its start, so that players need not load all of it first; that
    needs a second pass, which a stream does not allow.
    """
    flags = "use_metadata_tags" if isinstance(path, BytesIO) else "use_metadata_tags+faststart"
    return av.open(path, mode="w", format="mp4", options={"movflags": flags})


def encode_mp4(
    components: VideoComponents, path: str | BytesIO, metadata: Mapping[str, Any] | None = None
) -> None:
    """Writes pictures and sound as H.264 and AAC in an MP4 file, with texts stored in it.

    An odd width or height grows by one pixel, a copy of the edge: H.264 stores colours for
    blocks of two by two.

    Args:
        components: `images` must hold one picture or more.
        path: File, or a stream that is written from its current position.
        metadata: Texts beside those of `components`, which they replace.
    Raises:
        ValueError: there is no picture to write.
    """
    if components.images.shape[0] == 0:
        raise ValueError("cannot write a video of 0 pictures; expected images [T, H, W, C], T >= 1")
    texts = metadata_texts({**(components.metadata or {}), **(metadata or {})})
    with partial_file(path) as target, open_mp4(target) as container:
        container.metadata.update(texts)
        rate = Fraction(components.frame_rate).limit_denominator(RATE_DENOMINATOR_LIMIT)
        video = _add_video_stream(container, components.images, rate)
        audio = _add_audio_stream(container, components)
        for image in components.images:
            check_interrupt()
            container.mux(video.encode(_picture(image)))
        container.mux(video.encode())
        if audio is not None:
            for frame in _sound(components, rate):
                container.mux(audio.encode(frame))
            container.mux(audio.encode())


def _add_video_stream(container: Any, images: torch.Tensor, rate: Fraction) -> Any:
    stream = container.add_stream("h264", rate=rate)
    stream.width = images.shape[2] + images.shape[2] % 2
    stream.height = images.shape[1] + images.shape[1] % 2
    stream.pix_fmt = "yuv420p"
    return stream


def _add_audio_stream(container: Any, components: VideoComponents) -> Any | None:
    if components.audio is None:
        return None
    return container.add_stream(
        "aac", rate=int(components.audio["sample_rate"]), layout=_layout(components)
    )


def _layout(components: VideoComponents) -> str:
    """Name of the channel layout; more than two channels are mixed down to the first two."""
    assert components.audio is not None
    return "mono" if components.audio["waveform"].shape[1] == 1 else "stereo"


def _picture(image: torch.Tensor) -> av.VideoFrame:
    """One picture `[H, W, C]` in 0..1 as a frame of even size."""
    pixels = (image[..., :3].float() * 255).clamp(0, 255).byte()
    if pixels.shape[-1] == 1:
        pixels = pixels.expand(-1, -1, 3)
    height, width = pixels.shape[0], pixels.shape[1]
    if height % 2:
        pixels = torch.cat([pixels, pixels[-1:]], dim=0)
    if width % 2:
        pixels = torch.cat([pixels, pixels[:, -1:]], dim=1)
    frame = av.VideoFrame.from_ndarray(pixels.cpu().contiguous().numpy(), format="rgb24")
    return frame.reformat(format="yuv420p")


def _sound(components: VideoComponents, rate: Fraction) -> list[av.AudioFrame]:
    """The sound of the first item of the batch, as long as the pictures at most."""
    assert components.audio is not None
    sample_rate = int(components.audio["sample_rate"])
    limit = math.ceil(components.images.shape[0] / rate * sample_rate)
    waveform = components.audio["waveform"][0, :2, :limit].float().cpu().contiguous()
    if waveform.shape[1] == 0:
        return []
    frame = av.AudioFrame.from_ndarray(waveform.numpy(), format="fltp", layout=_layout(components))
    frame.sample_rate = sample_rate
    frame.pts = 0
    return [frame]
