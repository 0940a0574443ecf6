"""Types of node inputs, under the names of the first version."""

from typing import TYPE_CHECKING, Any

from comfy_api.latest import _input
from comfy_api.latest._input import AudioInput, LatentInput, VideoInput

if TYPE_CHECKING:
    from comfy_api.latest._input import ImageInput, MaskInput

__all__ = ["AudioInput", "ImageInput", "LatentInput", "MaskInput", "VideoInput"]


def __getattr__(name: str) -> Any:
    return getattr(_input, name)
