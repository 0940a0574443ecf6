"""Types of node inputs, for annotations and `isinstance`."""

from typing import TYPE_CHECKING, Any

from comfy_api.latest._input import basic_types
from comfy_api.latest._input.basic_types import AudioInput, LatentInput
from comfy_api.latest._input.video_types import VideoInput

if TYPE_CHECKING:
    from comfy_api.latest._input.basic_types import ImageInput, MaskInput

__all__ = ["AudioInput", "ImageInput", "LatentInput", "MaskInput", "VideoInput"]


def __getattr__(name: str) -> Any:
    return getattr(basic_types, name)
