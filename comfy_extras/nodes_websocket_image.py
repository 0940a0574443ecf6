"""Pictures that go to the client over its socket and into no file."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from comfy.progress import ProgressBar
from comfy_nodes.image_files import to_picture


class SaveImageWebsocket:
    """Sends each picture as a binary frame: PNG, in full size."""

    DESCRIPTION = "Sends the pictures to the client that started the prompt; nothing is stored."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"images": ("IMAGE",)}}

    RETURN_TYPES = ()
    FUNCTION = "save_images"
    OUTPUT_NODE = True
    CATEGORY = "api/image"

    def save_images(self, images: Tensor) -> dict[str, Any]:
        """images: [B, H, W, C] in 0..1."""
        bar = ProgressBar(len(images))
        for step, image in enumerate(images):
            bar.update_absolute(step, len(images), ("PNG", to_picture(image), None))
        return {}

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        """Never equal to what it was: who asks again wants the pictures again."""
        del inputs
        return math.nan


NODE_CLASS_MAPPINGS = {"SaveImageWebsocket": SaveImageWebsocket}
