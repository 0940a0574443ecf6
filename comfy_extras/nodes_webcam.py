"""A picture from the camera of the person's browser."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comfy_nodes.image_files import LoadImage
from comfy_nodes.limits import MAX_RESOLUTION


class WebcamCapture(LoadImage):
    """Reads the picture that the editor took and uploaded."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        side = {"default": 0, "min": 0, "max": MAX_RESOLUTION, "step": 1}
        return {
            "required": {
                "image": ("WEBCAM", {}),
                "width": ("INT", dict(side)),
                "height": ("INT", dict(side)),
                "capture_on_queue": ("BOOLEAN", {"default": True}),
            }
        }

    RETURN_TYPES = ("IMAGE",)  # type: ignore[assignment]
    FUNCTION = "load_capture"
    CATEGORY = "image"

    def load_capture(self, image: str, **kwargs: Any) -> tuple[Tensor]:
        """The picture [1, H, W, 3]; size and moment are the editor's business."""
        del kwargs
        return (self.load_image(image)[0],)

    @classmethod
    def IS_CHANGED(cls, image: str, **kwargs: Any) -> str:
        del kwargs
        return super().IS_CHANGED(image)


NODE_CLASS_MAPPINGS = {"WebcamCapture": WebcamCapture}
NODE_DISPLAY_NAME_MAPPINGS = {"WebcamCapture": "Webcam Capture"}
