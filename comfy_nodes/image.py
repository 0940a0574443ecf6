"""Nodes that make and change pictures. An IMAGE is a float32 tensor [B, H, W, C] with values
0..1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import node_helpers
from comfy import resize
from comfy.devices import memory
from comfy_nodes.limits import MAX_RESOLUTION
from comfy_nodes.picture_basics import scaled_sides

UPSCALE_METHODS = ["nearest-exact", "bilinear", "area", "bicubic", "lanczos"]
CROP_METHODS = ["disabled", "center"]


class EmptyImage:
    """A picture of one colour."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        side = {"default": 512, "min": 1, "max": MAX_RESOLUTION, "step": 1}
        colour = {"default": 0, "min": 0, "max": 0xFFFFFF, "step": 1, "display": "color"}
        return {
            "required": {
                "width": ("INT", side),
                "height": ("INT", side),
                "batch_size": ("INT", {"default": 1, "min": 1, "max": 4096}),
                "color": ("INT", colour),
            }
        }

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "generate"
    CATEGORY = "image"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def generate(
        self, width: int, height: int, batch_size: int = 1, color: int = 0
    ) -> tuple[Tensor]:
        """Pictures of the colour 0xRRGGBB."""
        channels = [(color >> shift & 0xFF) / 0xFF for shift in (16, 8, 0)]
        memory.require_room((batch_size, height, width, 3), "an empty picture", self.device)
        pixel = torch.tensor(channels, device=self.device)
        return (pixel.expand(batch_size, height, width, 3).contiguous(),)


class ImageScale:
    """Resizes a picture to a size in pixels."""

    upscale_methods = UPSCALE_METHODS
    crop_methods = CROP_METHODS

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        side = {"default": 512, "min": 0, "max": MAX_RESOLUTION, "step": 1}
        return {
            "required": {
                "image": ("IMAGE",),
                "upscale_method": (cls.upscale_methods,),
                "width": ("INT", side),
                "height": ("INT", side),
                "crop": (cls.crop_methods,),
            }
        }

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "upscale"
    CATEGORY = "image/upscaling"

    def upscale(
        self, image: Tensor, upscale_method: str, width: int, height: int, crop: str
    ) -> tuple[Tensor]:
        """A side of 0 follows from the other one and the proportions; both 0 changes nothing."""
        if width == 0 and height == 0:
            return (image,)
        rows, columns = image.shape[1], image.shape[2]
        if width == 0:
            width = max(1, round(columns * height / rows))
        elif height == 0:
            height = max(1, round(rows * width / columns))
        return (resized(image, width, height, upscale_method, crop),)


class ImageScaleBy:
    """Resizes a picture by a factor."""

    upscale_methods = UPSCALE_METHODS

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        factor = {"default": 1.0, "min": 0.01, "max": 8.0, "step": 0.01}
        return {
            "required": {
                "image": ("IMAGE",),
                "upscale_method": (cls.upscale_methods,),
                "scale_by": ("FLOAT", factor),
            }
        }

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "upscale"
    CATEGORY = "image/upscaling"

    def upscale(self, image: Tensor, upscale_method: str, scale_by: float) -> tuple[Tensor]:
        """Both sides times the factor, rounded.

        Raises:
            ValueError: No pixel would be left of a side.
        """
        rows, columns = image.shape[1:3]
        width, height = scaled_sides(columns, rows, scale_by, "scale_by")
        return (resized(image, width, height, upscale_method, "disabled"),)


class ImageInvert:
    """Turns dark into light."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": ("IMAGE",)}}

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "invert"
    CATEGORY = "image"

    def invert(self, image: Tensor) -> tuple[Tensor]:
        """1 minus each value."""
        return (1.0 - image,)


class ImageBatch:
    """Joins two batches of pictures."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image1": ("IMAGE",), "image2": ("IMAGE",)}}

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "batch"
    CATEGORY = "image"
    DEPRECATED = True

    def batch(self, image1: Tensor, image2: Tensor) -> tuple[Tensor]:
        """The second batch takes the size of the first; a batch without alpha becomes opaque."""
        if image1.shape[-1] < image2.shape[-1]:
            image2, image1 = node_helpers.image_alpha_fix(image2, image1)
        else:
            image1, image2 = node_helpers.image_alpha_fix(image1, image2)
        if image1.shape[1:] != image2.shape[1:]:
            image2 = resized(image2, image1.shape[2], image1.shape[1], "bilinear", "center")
        return (torch.cat((image1, image2), dim=0),)


class ImagePadForOutpaint:
    """Adds a border to be painted."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        def border(default: int = 0, step: int = 8) -> tuple[str, dict[str, int]]:
            return ("INT", {"default": default, "min": 0, "max": MAX_RESOLUTION, "step": step})

        return {
            "required": {
                "image": ("IMAGE",),
                "left": border(),
                "top": border(),
                "right": border(),
                "bottom": border(),
                "feathering": border(40, 1),
            }
        }

    RETURN_TYPES = ("IMAGE", "MASK")
    FUNCTION = "expand_image"
    CATEGORY = "image"

    def expand_image(
        self, image: Tensor, left: int, top: int, right: int, bottom: int, feathering: int
    ) -> tuple[Tensor, Tensor]:
        """The picture on a larger grey one, and the mask of the part to paint.

        Inside the picture, the mask rises again with the square of the closeness to a border that
        was added.
        """
        count, rows, columns, channels = image.shape
        size = (rows + top + bottom, columns + left + right)
        memory.require_room((count, *size, channels), "the padded picture")
        padded = torch.full((count, *size, channels), 0.5, dtype=torch.float32)
        padded[:, top : top + rows, left : left + columns] = image
        mask = torch.ones(size, dtype=torch.float32)
        inner = torch.zeros(rows, columns)
        if 0 < feathering * 2 < min(rows, columns):
            down = _distance(rows, top > 0, bottom > 0)[:, None]
            across = _distance(columns, left > 0, right > 0)[None, :]
            closeness = 1 - torch.minimum(down, across) / feathering
            inner = closeness.clamp(min=0) ** 2
        mask[top : top + rows, left : left + columns] = inner
        return (padded, mask.unsqueeze(0))


def _distance(length: int, before: bool, after: bool) -> Tensor:
    """Distance of each position from the borders that were added; infinite without any."""
    positions = torch.arange(length, dtype=torch.float32)
    never = torch.full_like(positions, float("inf"))
    return torch.minimum(positions if before else never, length - positions if after else never)


def resized(image: Tensor, width: int, height: int, method: str, crop: str) -> Tensor:
    """Pictures [B, H, W, C] at another size."""
    channels_first = image.movedim(-1, 1)
    return resize.common_upscale(channels_first, width, height, method, crop).movedim(1, -1)


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "EmptyImage": EmptyImage,
    "ImageScale": ImageScale,
    "ImageScaleBy": ImageScaleBy,
    "ImageInvert": ImageInvert,
    "ImageBatch": ImageBatch,
    "ImagePadForOutpaint": ImagePadForOutpaint,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "ImageScale": "Upscale Image",
    "ImageScaleBy": "Upscale Image By",
    "ImageInvert": "Invert Image",
    "ImageBatch": "Batch Images",
    "ImagePadForOutpaint": "Pad Image for Outpainting",
}
