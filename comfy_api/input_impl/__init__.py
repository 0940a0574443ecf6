"""Implementations of input types, under the names of the first version."""

from comfy_api.latest._input_impl import VideoFromComponents, VideoFromFile

__all__ = ["VideoFromComponents", "VideoFromFile"]
