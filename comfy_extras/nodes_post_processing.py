"""Nodes that blend, blur, sharpen, reduce, resize and batch finished pictures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import node_helpers
from comfy_api.latest import ComfyExtension, io
from comfy_extras.gaussian import filter_channels, gaussian_kernel, sharpening_kernel
from comfy_extras.images.batching import BatchImagesNode, BatchLatentsNode, BatchMasksNode
from comfy_nodes.image import resized
from comfy_nodes.picture_basics import check_count, colours_of, scaled_sides

METHODS = ["nearest-exact", "bilinear", "area", "bicubic", "lanczos"]
PIXELS_PER_MEGAPIXEL = 1024 * 1024
MAX_RESOLUTION = 16384


def _overlay(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a <= 0.5, 2 * a * b, 1 - 2 * (1 - a) * (1 - b))


def _soft_light(a: Tensor, b: Tensor) -> Tensor:
    bent = torch.where(a <= 0.25, ((16 * a - 12) * a + 4) * a, a.clamp(min=0).sqrt())
    return torch.where(b <= 0.5, a - (1 - 2 * b) * a * (1 - a), a + (2 * b - 1) * (bent - a))


BLEND_MODES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "normal": lambda _a, b: b,
    "multiply": lambda a, b: a * b,
    "screen": lambda a, b: 1 - (1 - a) * (1 - b),
    "overlay": _overlay,
    "soft_light": _soft_light,
    "difference": lambda a, b: a - b,
}


class Blend(io.ComfyNode):
    """Blends two pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageBlend",
            category="image/postprocessing",
            inputs=[
                io.Image.Input("image1"),
                io.Image.Input("image2"),
                io.Float.Input("blend_factor", default=0.5, min=0.0, max=1.0, step=0.01),
                io.Combo.Input("blend_mode", options=list(BLEND_MODES)),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(
        cls, image1: Tensor, image2: Tensor, blend_factor: float, blend_mode: str
    ) -> io.NodeOutput:
        image1, image2 = node_helpers.image_alpha_fix(image1, image2.to(image1.device))
        if image1.shape != image2.shape:
            image2 = resized(image2, image1.shape[2], image1.shape[1], "bicubic", "center")
        if image1.shape[0] > 1:
            check_count(image2.shape[0], image1.shape[0], "picture", "image2", "image1")
        blended = BLEND_MODES[blend_mode](image1, image2)
        mixed = image1 * (1 - blend_factor) + blended * blend_factor
        return io.NodeOutput(mixed.clamp(0, 1))

    blend_images = execute


class Blur(io.ComfyNode):
    """Blurs a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageBlur",
            category="image/postprocessing",
            inputs=[
                io.Image.Input("image"),
                io.Int.Input("blur_radius", default=1, min=1, max=31, step=1),
                io.Float.Input("sigma", default=1.0, min=0.1, max=10.0, step=0.1),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, blur_radius: int, sigma: float) -> io.NodeOutput:
        if blur_radius == 0:
            return io.NodeOutput(image)
        kernel = gaussian_kernel(blur_radius * 2 + 1, sigma).to(image)
        blurred = filter_channels(image.movedim(-1, 1), kernel)
        return io.NodeOutput(blurred.movedim(1, -1))

    blur = execute


class Sharpen(io.ComfyNode):
    """Sharpens a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageSharpen",
            category="image/postprocessing",
            inputs=[
                io.Image.Input("image"),
                io.Int.Input("sharpen_radius", default=1, min=1, max=31, step=1),
                io.Float.Input("sigma", default=1.0, min=0.1, max=10.0, step=0.01),
                io.Float.Input("alpha", default=1.0, min=0.0, max=5.0, step=0.01),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(
        cls, image: Tensor, sharpen_radius: int, sigma: float, alpha: float
    ) -> io.NodeOutput:
        if sharpen_radius == 0:
            return io.NodeOutput(image)
        kernel = sharpening_kernel(sharpen_radius, sigma, alpha).to(image)
        sharpened = filter_channels(image.movedim(-1, 1), kernel)
        return io.NodeOutput(sharpened.movedim(1, -1).clamp(0, 1))

    sharpen = execute


class Quantize(io.ComfyNode):
    """Reduces a picture to few colours."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        ways = ["none", "floyd-steinberg", "bayer-2", "bayer-4", "bayer-8", "bayer-16"]
        return io.Schema(
            node_id="ImageQuantize",
            category="image/postprocessing",
            inputs=[
                io.Image.Input("image"),
                io.Int.Input("colors", default=256, min=1, max=256, step=1),
                io.Combo.Input("dither", options=ways),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, colors: int, dither: str) -> io.NodeOutput:
        pictures = [_quantized(picture, colors, dither) for picture in colours_of(image)]
        return io.NodeOutput(torch.stack(pictures))


def _quantized(picture: Tensor, colours: int, dither: str) -> Tensor:
    """One picture [H, W, 3] with at most `colours` colours."""
    full = Image.fromarray((picture.clamp(0, 1) * 255).to(torch.uint8).cpu().numpy(), mode="RGB")
    palette = full.quantize(colors=colours)
    if dither == "floyd-steinberg":
        few = full.quantize(colors=colours, palette=palette, dither=Image.Dither.FLOYDSTEINBERG)
    elif dither.startswith("bayer"):
        few = _ordered(full, palette, int(dither.split("-")[1]))
    else:
        few = full.quantize(colors=colours, palette=palette, dither=Image.Dither.NONE)
    return torch.from_numpy(np.asarray(few.convert("RGB")).astype(np.float32) / 255.0)


def _ordered(full: Image.Image, palette: Image.Image, order: int) -> Image.Image:
    """Ordered dithering: a threshold pattern, as strong as colours lie apart, is added first.

    Source: Bayer 1973, An optimum method for two-level rendition of continuous-tone pictures.
    """
    colours = np.asarray(palette.getpalette(), dtype=np.float32).reshape(-1, 3)
    used = colours[: len(palette.getcolors() or [0])]
    spread = 2 * 256 / max(len(used), 1)
    pattern = _bayer(order) * spread / (order * order) + spread * (0.5 / (order * order) - 0.5)
    values = np.asarray(full, dtype=np.float32)
    rows, columns = values.shape[:2]
    repeats = (-(-rows // order), -(-columns // order))
    tiled = np.tile(pattern, repeats)[:rows, :columns, None]
    shifted = np.clip(values + tiled + 0.5, 0, 255).astype(np.uint8)  # rounded
    return Image.fromarray(shifted).quantize(palette=palette, dither=Image.Dither.NONE)


def _bayer(order: int) -> np.ndarray:
    """Threshold numbers 0 to order^2 - 1 [order, order], order a power of 2."""
    pattern = np.zeros((1, 1))
    while pattern.shape[0] < order:
        quarters = [[4 * pattern, 4 * pattern + 2], [4 * pattern + 3, 4 * pattern + 1]]
        pattern = np.block(quarters)
    return pattern


class ImageScaleToTotalPixels(io.ComfyNode):
    """Scales a picture in proportion to a number of pixels."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageScaleToTotalPixels",
            category="image/upscaling",
            inputs=[
                io.Image.Input("image"),
                io.Combo.Input("upscale_method", options=list(METHODS)),
                io.Float.Input("megapixels", default=1.0, min=0.01, max=16.0, step=0.01),
                io.Int.Input("resolution_steps", default=1, min=1, max=256),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(
        cls, image: Tensor, upscale_method: str, megapixels: float, resolution_steps: int
    ) -> io.NodeOutput:
        rows, columns = image.shape[1:3]
        scale = math.sqrt(megapixels * PIXELS_PER_MEGAPIXEL / (columns * rows))
        width, height = (
            max(1, round(side * scale / resolution_steps)) * resolution_steps
            for side in (columns, rows)
        )
        return io.NodeOutput(resized(image, width, height, upscale_method, "disabled"))


def _side(id: str) -> io.Int.Input:
    return io.Int.Input(id, default=512, min=0, max=MAX_RESOLUTION, step=1)


def _crop() -> io.Combo.Input:
    return io.Combo.Input("crop", options=["disabled", "center"], default="center")


Size = tuple[int, int]


def _in_proportion(width: int, height: int, rows: int, columns: int) -> Size:
    """(width, height) where a side of 0 follows from the other; both 0 keep the size."""
    if width == 0 and height == 0:
        return columns, rows
    if width == 0:
        width = max(1, round(columns * height / rows))
    if height == 0:
        height = max(1, round(rows * width / columns))
    return width, height


def _longer_side(size: int, rows: int, columns: int) -> Size:
    if rows > columns:
        return _in_proportion(0, size, rows, columns)
    return _in_proportion(size, 0, rows, columns)


def _shorter_side(size: int, rows: int, columns: int) -> Size:
    if rows < columns:
        return _in_proportion(0, size, rows, columns)
    return _in_proportion(size, 0, rows, columns)


# How the wanted size follows from the choice's own inputs and the picture's rows and columns.
SIZE_RULES: dict[str, Callable[[dict[str, Any], int, int], Size]] = {
    "scale by multiplier": lambda o, rows, columns: scaled_sides(
        columns, rows, o["multiplier"], "multiplier"
    ),
    "scale dimensions": lambda o, rows, columns: _in_proportion(
        o["width"], o["height"], rows, columns
    ),
    "scale longer dimension": lambda o, rows, columns: _longer_side(
        o["longer_size"], rows, columns
    ),
    "scale shorter dimension": lambda o, rows, columns: _shorter_side(
        o["shorter_size"], rows, columns
    ),
    "scale width": lambda o, rows, columns: _in_proportion(o["width"], 0, rows, columns),
    "scale height": lambda o, rows, columns: _in_proportion(0, o["height"], rows, columns),
    "scale total pixels": lambda o, rows, columns: scaled_sides(
        columns,
        rows,
        math.sqrt(o["megapixels"] * PIXELS_PER_MEGAPIXEL / (rows * columns)),
        "megapixels",
    ),
    "match size": lambda o, _rows, _columns: (o["match"].shape[2], o["match"].shape[1]),
}


class ResizeImageMaskNode(io.ComfyNode):
    """Resizes a picture or a mask in one of several ways."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        template = io.MatchType.Template("input_type", [io.Image, io.Mask])
        factor = io.Float.Input("multiplier", default=1.0, min=0.01, max=8.0, step=0.01)
        megapixels = io.Float.Input("megapixels", default=1.0, min=0.01, max=16.0, step=0.01)
        match = io.MultiType.Input("match", [io.Image, io.Mask])
        choices: dict[str, list[io.Input]] = {
            "scale by multiplier": [factor],
            "scale dimensions": [_side("width"), _side("height"), _crop()],
            "scale longer dimension": [_side("longer_size")],
            "scale shorter dimension": [_side("shorter_size")],
            "scale width": [_side("width")],
            "scale height": [_side("height")],
            "scale total pixels": [megapixels],
            "match size": [match, _crop()],
        }
        options = [io.DynamicCombo.Option(key, inputs) for key, inputs in choices.items()]
        return io.Schema(
            node_id="ResizeImageMaskNode",
            display_name="Resize Image/Mask",
            category="transform",
            description="Resizes a picture or a mask.",
            inputs=[
                io.MatchType.Input("input", template=template),
                io.DynamicCombo.Input("resize_type", options=options),
                io.Combo.Input("scale_method", options=list(METHODS), default="area"),
            ],
            outputs=[io.MatchType.Output(template=template, display_name="resized")],
        )

    @classmethod
    def execute(
        cls, input: Tensor, scale_method: str, resize_type: dict[str, Any]
    ) -> io.NodeOutput:
        is_mask = input.ndim < 4
        image = input.reshape(-1, *input.shape[-2:], 1) if is_mask else input
        rule = SIZE_RULES[resize_type["resize_type"]]
        width, height = rule(resize_type, image.shape[1], image.shape[2])
        crop = resize_type.get("crop", "disabled")
        if (height, width) != tuple(image.shape[1:3]):
            image = resized(image, width, height, scale_method, crop)
        return io.NodeOutput(image.squeeze(-1) if is_mask else image)


class PostProcessingExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            Blend,
            Blur,
            Quantize,
            Sharpen,
            ImageScaleToTotalPixels,
            ResizeImageMaskNode,
            BatchImagesNode,
            BatchMasksNode,
            BatchLatentsNode,
        ]


async def comfy_entrypoint() -> PostProcessingExtension:
    """Called by the loader of built-in modules."""
    return PostProcessingExtension()
