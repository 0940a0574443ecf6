"""Morphology on pictures, and their luma and chroma.

Every operation takes the least or greatest value in a square window around each pixel; beyond the
border there is nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_nodes.picture_basics import colours_of


def dilate(x: Tensor, size: int) -> Tensor:
    """Greatest value [B, C, H, W] in a window of `size` pixels around each pixel."""
    before, after = size // 2, size - 1 - size // 2
    padded = functional.pad(x, (before, after, before, after), value=float("-inf"))
    # One axis after the other: the window is a square.
    rows = functional.max_pool2d(padded, (size, 1), stride=1)
    return functional.max_pool2d(rows, (1, size), stride=1)


def erode(x: Tensor, size: int) -> Tensor:
    """Least value in a window."""
    return -dilate(-x, size)


def opened(x: Tensor, size: int) -> Tensor:
    """Without bright spots smaller than the window."""
    return dilate(erode(x, size), size)


def closed(x: Tensor, size: int) -> Tensor:
    """Without dark spots smaller than the window."""
    return erode(dilate(x, size), size)


OPERATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "erode": erode,
    "dilate": dilate,
    "open": opened,
    "close": closed,
    "gradient": lambda x, size: dilate(x, size) - erode(x, size),
    "bottom_hat": lambda x, size: closed(x, size) - x,
    "top_hat": lambda x, size: x - opened(x, size),
}


class Morphology(io.ComfyNode):
    """Applies one operation to pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Morphology",
            display_name="ImageMorphology",
            category="image/postprocessing",
            inputs=[
                io.Image.Input("image"),
                io.Combo.Input("operation", options=list(OPERATIONS)),
                io.Int.Input("kernel_size", default=3, min=3, max=999, step=1),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, operation: str, kernel_size: int) -> io.NodeOutput:
        made = OPERATIONS[operation](image.movedim(-1, 1), kernel_size)
        return io.NodeOutput(made.movedim(1, -1))

    process = execute


# Recommendation ITU-R BT.601, with both colour differences around a half.
LUMA = (0.299, 0.587, 0.114)
BLUE_SCALE, RED_SCALE = 0.564, 0.713
HALF = 0.5


def to_yuv(image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Luma and both colour differences [B, H, W] of pictures [B, H, W, C]."""
    red, green, blue = colours_of(image).unbind(-1)
    luma = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    return luma, (blue - luma) * BLUE_SCALE + HALF, (red - luma) * RED_SCALE + HALF


def to_rgb(luma: Tensor, blue: Tensor, red: Tensor) -> Tensor:
    """The inverse of `to_yuv`, in 0..1."""
    blue, red = blue - HALF, red - HALF
    channels = (luma + 1.403 * red, luma - 0.714 * red - 0.344 * blue, luma + 1.773 * blue)
    return torch.stack(channels, dim=-1).clamp(0.0, 1.0)


class ImageRGBToYUV(io.ComfyNode):
    """Takes luma and colour differences apart, each as a grey picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageRGBToYUV",
            category="image/batch",
            inputs=[io.Image.Input("image")],
            outputs=[io.Image.Output(display_name=name) for name in ("Y", "U", "V")],
        )

    @classmethod
    def execute(cls, image: Tensor) -> io.NodeOutput:
        parts = to_yuv(image)
        return io.NodeOutput(*[part[..., None].repeat(1, 1, 1, 3) for part in parts])


class ImageYUVToRGB(io.ComfyNode):
    """Joins luma and colour differences."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageYUVToRGB",
            category="image/batch",
            inputs=[io.Image.Input(name) for name in ("Y", "U", "V")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, Y: Tensor, U: Tensor, V: Tensor) -> io.NodeOutput:
        shapes = [tuple(part.shape[:3]) for part in (Y, U, V)]
        if len(set(shapes)) > 1:
            raise ValueError(
                "Y, U, V: expected as many pictures of one size, found [batch, height, width] "
                + ", ".join(map(str, shapes))
            )
        return io.NodeOutput(to_rgb(*[part.mean(dim=-1) for part in (Y, U, V)]))


comfy_entrypoint = entrypoint_of(Morphology, ImageRGBToYUV, ImageYUVToRGB)
