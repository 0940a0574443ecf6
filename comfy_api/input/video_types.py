"""The type of videos, under the name of the first version."""

from comfy_api.latest._input.video_types import VideoInput

__all__ = ["VideoInput"]
