"""Videos from files and from parts, under the names of the first version."""

from comfy_api.latest._input_impl.video_types import VideoFromComponents, VideoFromFile

__all__ = ["VideoFromComponents", "VideoFromFile"]
