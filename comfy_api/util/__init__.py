"""Facts about videos, under the names of the first version."""

from comfy_api.latest._util import VideoCodec, VideoComponents, VideoContainer

__all__ = ["VideoCodec", "VideoComponents", "VideoContainer"]
