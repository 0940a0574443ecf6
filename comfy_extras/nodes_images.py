"""Nodes that cut, turn and repeat pictures; for joining and saving see `comfy_extras.images`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import progress
from comfy.devices import memory
from comfy_api.latest import ComfyExtension, io
from comfy_extras.images.advanced_saving import SaveImageAdvanced
from comfy_extras.images.saving import SaveAnimatedPNG, SaveAnimatedWEBP, SaveSVGNode
from comfy_extras.images.stitching import ImageStitch
from comfy_nodes.image import resized
from comfy_nodes.limits import MAX_RESOLUTION

LARGEST_BATCH = 4096
LARGEST_SEED = 0xFFFFFFFFFFFFFFFF


class ImageCrop(io.ComfyNode):
    """Cuts a rectangle out of a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def number(id: str, default: int, least: int) -> io.Int.Input:
            return io.Int.Input(id, default=default, min=least, max=MAX_RESOLUTION, step=1)

        return io.Schema(
            node_id="ImageCrop",
            display_name="Image Crop",
            category="image/transform",
            inputs=[
                io.Image.Input("image"),
                number("width", 512, 1),
                number("height", 512, 1),
                number("x", 0, 0),
                number("y", 0, 0),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, width: int, height: int, x: int, y: int) -> io.NodeOutput:
        x, y = min(x, image.shape[2] - 1), min(y, image.shape[1] - 1)
        return io.NodeOutput(image[:, y : y + height, x : x + width])

    crop = execute


class ImageCropV2(io.ComfyNode):
    """Cuts a rectangle that is drawn on it out of a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageCropV2",
            display_name="Crop Image",
            category="image/transform",
            description="Cuts a rectangle out of a picture.",
            inputs=[
                io.Image.Input("image"),
                io.BoundingBox.Input("crop_region", component="ImageCrop"),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, crop_region: Any) -> io.NodeOutput:
        if isinstance(crop_region, list) and len(crop_region) == 1:
            crop_region = crop_region[0]  # as nodes hand on boxes of which there may be several
        if not isinstance(crop_region, Mapping):
            raise ValueError(
                "crop_region: expected one rectangle with x, y, width and height, found "
                f"{crop_region!r:.100}"
            )
        for name, least in (("x", 0), ("y", 0), ("width", 1), ("height", 1)):
            value = crop_region.get(name)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"crop_region: expected {name} as a whole number from {least} on, found "
                    f"{value!r:.40}"
                )
        left, top = crop_region["x"], crop_region["y"]
        return ImageCrop.execute(image, crop_region["width"], crop_region["height"], left, top)


class PrimitiveBoundingBox(io.ComfyNode):
    """A rectangle in a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def number(id: str, default: int, least: int) -> io.Int.Input:
            return io.Int.Input(id, default=default, min=least, max=MAX_RESOLUTION)

        places = [number("x", 0, 0), number("y", 0, 0)]
        return io.Schema(
            node_id="PrimitiveBoundingBox",
            display_name="Bounding Box",
            category="utils/primitive",
            inputs=[*places, number("width", 512, 1), number("height", 512, 1)],
            outputs=[io.BoundingBox.Output(display_name="bounding_box")],
        )

    @classmethod
    def execute(cls, x: int, y: int, width: int, height: int) -> io.NodeOutput:
        return io.NodeOutput({"x": x, "y": y, "width": width, "height": height})


class RepeatImageBatch(io.ComfyNode):
    """Repeats a batch of pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RepeatImageBatch",
            category="image/batch",
            inputs=[
                io.Image.Input("image"),
                io.Int.Input("amount", default=1, min=1, max=LARGEST_BATCH),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, amount: int) -> io.NodeOutput:
        shape = (amount * image.shape[0], *image.shape[1:])
        memory.require_room(shape, "the repeated picture", image.device, image.dtype)
        return io.NodeOutput(image.repeat(amount, 1, 1, 1))


class ImageFromBatch(io.ComfyNode):
    """Takes a run of pictures out of a batch."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageFromBatch",
            category="image/batch",
            inputs=[
                io.Image.Input("image"),
                io.Int.Input("batch_index", default=0, min=0, max=LARGEST_BATCH - 1),
                io.Int.Input("length", default=1, min=1, max=LARGEST_BATCH),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, batch_index: int, length: int) -> io.NodeOutput:
        start = min(image.shape[0] - 1, batch_index)
        return io.NodeOutput(image[start : start + length].clone())


class ImageAddNoise(io.ComfyNode):
    """Adds noise to a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageAddNoise",
            category="image",
            inputs=[
                io.Image.Input("image"),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=LARGEST_SEED,
                    control_after_generate=True,
                    tooltip="Start of the random numbers.",
                ),
                io.Float.Input("strength", default=0.5, min=0.0, max=1.0, step=0.01),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, seed: int, strength: float) -> io.NodeOutput:
        generator = torch.manual_seed(seed)
        noise = torch.randn(image.shape, generator=generator, device="cpu").to(image)
        return io.NodeOutput((image + strength * noise).clamp(0.0, 1.0))

    repeat = execute


class ResizeAndPadImage(io.ComfyNode):
    """Fits a picture into a size, with bars where it does not fill it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def side(id: str) -> io.Int.Input:
            return io.Int.Input(id, default=512, min=1, max=MAX_RESOLUTION, step=1)

        methods = ["area", "bicubic", "nearest-exact", "bilinear", "lanczos"]
        return io.Schema(
            node_id="ResizeAndPadImage",
            category="image/transform",
            inputs=[
                io.Image.Input("image"),
                side("target_width"),
                side("target_height"),
                io.Combo.Input("padding_color", options=["white", "black"]),
                io.Combo.Input("interpolation", options=methods),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(
        cls,
        image: Tensor,
        target_width: int,
        target_height: int,
        padding_color: str,
        interpolation: str,
    ) -> io.NodeOutput:
        count, rows, columns, channels = image.shape
        scale = min(target_width / columns, target_height / rows)
        width, height = max(1, int(columns * scale)), max(1, int(rows * scale))
        small = resized(image, width, height, interpolation, "disabled")
        value = 0.0 if padding_color == "black" else 1.0
        shape = (count, target_height, target_width, channels)
        memory.require_room(shape, "the padded picture")
        canvas = torch.full(shape, value).to(image)
        top, left = (target_height - height) // 2, (target_width - width) // 2
        canvas[:, top : top + height, left : left + width] = small
        return io.NodeOutput(canvas)

    resize_and_pad = execute


class GetImageSize(io.ComfyNode):
    """Width, height and number of pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GetImageSize",
            display_name="Get Image Size",
            category="image",
            description="Gives the size of a picture and hands the picture on unchanged.",
            inputs=[io.Image.Input("image")],
            outputs=[
                io.Int.Output(display_name="width"),
                io.Int.Output(display_name="height"),
                io.Int.Output(display_name="batch_size"),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, image: Tensor) -> io.NodeOutput:
        count, height, width = image.shape[:3]
        progress.note(f"width: {width}, height: {height}\n batch size: {count}")
        return io.NodeOutput(width, height, count)

    get_size = execute


class ImageRotate(io.ComfyNode):
    """Turns a picture clockwise."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        turns = ["none", "90 degrees", "180 degrees", "270 degrees"]
        return io.Schema(
            node_id="ImageRotate",
            category="image/transform",
            inputs=[io.Image.Input("image"), io.Combo.Input("rotation", options=turns)],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, rotation: str) -> io.NodeOutput:
        quarters = {"90": 1, "180": 2, "270": 3}.get(rotation.split(" ")[0], 0)
        return io.NodeOutput(torch.rot90(image, k=quarters, dims=[2, 1]))

    rotate = execute


class ImageFlip(io.ComfyNode):
    """Mirrors a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        ways = ["x-axis: vertically", "y-axis: horizontally"]
        return io.Schema(
            node_id="ImageFlip",
            category="image/transform",
            inputs=[io.Image.Input("image"), io.Combo.Input("flip_method", options=ways)],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, flip_method: str) -> io.NodeOutput:
        return io.NodeOutput(torch.flip(image, dims=[{"x": 1, "y": 2}[flip_method[0]]]))

    flip = execute


class ImageScaleToMaxDimension(io.ComfyNode):
    """Scales a picture in proportion until its longer side has a size."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        methods = ["area", "lanczos", "bilinear", "nearest-exact", "bilinear", "bicubic"]
        return io.Schema(
            node_id="ImageScaleToMaxDimension",
            category="image/upscaling",
            inputs=[
                io.Image.Input("image"),
                io.Combo.Input("upscale_method", options=methods),
                io.Int.Input("largest_size", default=512, min=0, max=MAX_RESOLUTION, step=1),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor, upscale_method: str, largest_size: int) -> io.NodeOutput:
        if largest_size < 1:
            raise ValueError(f"largest_size: expected at least 1 pixel, found {largest_size}")
        height, width = image.shape[1:3]
        if height > width:
            width, height = max(1, round(width / height * largest_size)), largest_size
        elif width > height:
            height, width = max(1, round(height / width * largest_size)), largest_size
        else:
            height = width = largest_size
        return io.NodeOutput(resized(image, width, height, upscale_method, "disabled"))


class ImagesExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            ImageCrop,
            ImageCropV2,
            PrimitiveBoundingBox,
            RepeatImageBatch,
            ImageFromBatch,
            ImageAddNoise,
            SaveAnimatedWEBP,
            SaveAnimatedPNG,
            SaveSVGNode,
            SaveImageAdvanced,
            ImageStitch,
            ResizeAndPadImage,
            GetImageSize,
            ImageRotate,
            ImageFlip,
            ImageScaleToMaxDimension,
        ]


async def comfy_entrypoint() -> ImagesExtension:
    """Called by the loader of built-in modules."""
    return ImagesExtension()
