"""Nodes that change the pictures of a training set, one by one."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from comfy import resize
from comfy_api.latest import io
from comfy_extras.dataset.schema import image_schema, numpy_seed, seed_input


def resized(images: Tensor, width: int, height: int) -> Tensor:
    """Pictures [B, H, W, C] at another size, by Lanczos."""
    pixels = images.movedim(-1, 1)
    return resize.common_upscale(pixels, width, height, "lanczos", "disabled").movedim(1, -1)


def side_input(id: str, default: int) -> io.Int.Input:
    """A side in pixels."""
    return io.Int.Input(id, default=default, min=1, max=8192)


def factor_input() -> io.Float.Input:
    """How much of a quality is kept; 1 changes nothing."""
    return io.Float.Input("factor", default=1.0, min=0.0, max=2.0)


class ResizeImagesByShorterEdge(io.ComfyNode):
    """Pictures of one shorter side."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return image_schema(
            "ResizeImagesByShorterEdge",
            "Resize Images by Shorter Edge",
            "Resizes so that the shorter side has a length, keeping the proportions.",
            [side_input("shorter_edge", 512)],
        )

    @classmethod
    def execute(cls, images: Tensor, shorter_edge: int) -> io.NodeOutput:
        height, width = images.shape[1:3]
        scale = shorter_edge / min(height, width)
        size = (
            shorter_edge if width <= height else int(width * scale),
            shorter_edge if height <= width else int(height * scale),
        )
        return io.NodeOutput(resized(images, *size))


class ResizeImagesByLongerEdge(io.ComfyNode):
    """Pictures of one longer side."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return image_schema(
            "ResizeImagesByLongerEdge",
            "Resize Images by Longer Edge",
            "Resizes so that the longer side has a length, keeping the proportions.",
            [side_input("longer_edge", 1024)],
        )

    @classmethod
    def execute(cls, images: Tensor, longer_edge: int) -> io.NodeOutput:
        height, width = images.shape[1:3]
        scale = longer_edge / max(height, width)
        size = (
            longer_edge if width >= height else max(1, int(width * scale)),
            longer_edge if height >= width else max(1, int(height * scale)),
        )
        return io.NodeOutput(resized(images, *size))


class CenterCropImages(io.ComfyNode):
    """The middle of pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return image_schema(
            "CenterCropImages",
            "Center Crop Images",
            "Cuts out the middle; a smaller picture is kept whole.",
            [side_input("width", 512), side_input("height", 512)],
        )

    @classmethod
    def execute(cls, images: Tensor, width: int, height: int) -> io.NodeOutput:
        top = max(0, images.shape[1] - height) // 2
        left = max(0, images.shape[2] - width) // 2
        return io.NodeOutput(images[:, top : top + height, left : left + width])


class RandomCropImages(io.ComfyNode):
    """A part of pictures, chosen by a seed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return image_schema(
            "RandomCropImages",
            "Random Crop Images",
            "Cuts out a part at a random place, to vary a training set.",
            [side_input("width", 512), side_input("height", 512), seed_input()],
        )

    @classmethod
    def execute(cls, images: Tensor, width: int, height: int, seed: int) -> io.NodeOutput:
        chance = np.random.RandomState(numpy_seed(seed))
        free_columns = max(0, images.shape[2] - width)
        free_rows = max(0, images.shape[1] - height)
        left = int(chance.randint(0, free_columns + 1)) if free_columns else 0
        top = int(chance.randint(0, free_rows + 1)) if free_rows else 0
        return io.NodeOutput(images[:, top : top + height, left : left + width])


class NormalizeImages(io.ComfyNode):
    """Pictures around zero."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return image_schema(
            "NormalizeImages",
            "Normalize Images",
            "Subtracts a mean and divides by a standard deviation.",
            [
                io.Float.Input("mean", default=0.5, min=0.0, max=1.0),
                io.Float.Input("std", default=0.5, min=0.001, max=1.0),
            ],
        )

    @classmethod
    def execute(cls, images: Tensor, mean: float, std: float) -> io.NodeOutput:
        return io.NodeOutput((images - mean) / std)


class AdjustBrightness(io.ComfyNode):
    """Brighter or darker pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        about = "Multiplies the brightness."
        return image_schema("AdjustBrightness", "Adjust Brightness", about, [factor_input()])

    @classmethod
    def execute(cls, images: Tensor, factor: float) -> io.NodeOutput:
        return io.NodeOutput((images * factor).clamp(0.0, 1.0))


class AdjustContrast(io.ComfyNode):
    """Pictures of more or less contrast."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        about = "Multiplies the distance from mid grey."
        return image_schema("AdjustContrast", "Adjust Contrast", about, [factor_input()])

    @classmethod
    def execute(cls, images: Tensor, factor: float) -> io.NodeOutput:
        return io.NodeOutput(((images - 0.5) * factor + 0.5).clamp(0.0, 1.0))


NODES: tuple[type[io.ComfyNode], ...] = (
    ResizeImagesByShorterEdge,
    ResizeImagesByLongerEdge,
    CenterCropImages,
    RandomCropImages,
    NormalizeImages,
    AdjustBrightness,
    AdjustContrast,
)
