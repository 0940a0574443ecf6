"""Types of pictures, masks, sounds and latents, under the names of the first version."""

from typing import TYPE_CHECKING, Any

from comfy_api.latest import _input
from comfy_api.latest._input import AudioInput, LatentInput

if TYPE_CHECKING:
    from comfy_api.latest._input import ImageInput, MaskInput

__all__ = ["AudioInput", "ImageInput", "LatentInput", "MaskInput"]


def __getattr__(name: str) -> Any:
    return getattr(_input, name)
