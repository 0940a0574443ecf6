"""Implementations of input types."""

from comfy_api.latest._input_impl.video_types import VideoFromComponents, VideoFromFile

__all__ = ["VideoFromComponents", "VideoFromFile"]
