"""Nodes that cut, turn, join and repeat pictures, and save moving ones."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

import folder_paths
import node_helpers
from comfy_api.latest import ComfyExtension, io, ui
from comfy_nodes.image import resized
from comfy_nodes.limits import MAX_RESOLUTION

LARGEST_BATCH = 4096
LARGEST_SEED = 0xFFFFFFFFFFFFFFFF

COLOURS: dict[str, tuple[float, float, float]] = {
    "white": (1.0, 1.0, 1.0),
    "black": (0.0, 0.0, 0.0),
    "red": (1.0, 0.0, 0.0),
    "green": (0.0, 1.0, 0.0),
    "blue": (0.0, 0.0, 1.0),
}


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


class SaveAnimatedWEBP(io.ComfyNode):
    """Saves a batch of pictures as a moving WebP."""

    METHODS = {"default": 4, "fastest": 0, "slowest": 6}  # noqa: RUF012 - a constant

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveAnimatedWEBP",
            category="image/animation",
            inputs=[
                io.Image.Input("images"),
                io.String.Input("filename_prefix", default="ComfyUI"),
                io.Float.Input("fps", default=6.0, min=0.01, max=1000.0, step=0.01),
                io.Boolean.Input("lossless", default=True),
                io.Int.Input("quality", default=80, min=0, max=100),
                io.Combo.Input("method", options=list(cls.METHODS)),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        images: Tensor,
        fps: float,
        filename_prefix: str,
        lossless: bool,
        quality: int,
        method: str,
    ) -> io.NodeOutput:
        saved = ui.ImageSaveHelper.get_save_animated_webp_ui(
            images=images,
            filename_prefix=filename_prefix,
            cls=cls,
            fps=fps,
            lossless=lossless,
            quality=quality,
            method=cls.METHODS[method],
        )
        return io.NodeOutput(ui=saved)


class SaveAnimatedPNG(io.ComfyNode):
    """Saves a batch of pictures as a moving PNG."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveAnimatedPNG",
            category="image/animation",
            inputs=[
                io.Image.Input("images"),
                io.String.Input("filename_prefix", default="ComfyUI"),
                io.Float.Input("fps", default=6.0, min=0.01, max=1000.0, step=0.01),
                io.Int.Input("compress_level", default=4, min=0, max=9),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls, images: Tensor, fps: float, compress_level: int, filename_prefix: str = "ComfyUI"
    ) -> io.NodeOutput:
        saved = ui.ImageSaveHelper.get_save_animated_png_ui(
            images=images,
            filename_prefix=filename_prefix,
            cls=cls,
            fps=fps,
            compress_level=compress_level,
        )
        return io.NodeOutput(ui=saved)


class ImageStitch(io.ComfyNode):
    """Puts two pictures side by side."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageStitch",
            display_name="Image Stitch",
            category="image/transform",
            description="Puts the second picture on the chosen side of the first one.",
            inputs=[
                io.Image.Input("image1"),
                io.Combo.Input(
                    "direction", options=["right", "down", "left", "up"], default="right"
                ),
                io.Boolean.Input("match_image_size", default=True),
                io.Int.Input("spacing_width", default=0, min=0, max=1024, step=2),
                io.Combo.Input("spacing_color", options=list(COLOURS), default="white"),
                io.Image.Input("image2", optional=True),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(
        cls,
        image1: Tensor,
        direction: str,
        match_image_size: bool,
        spacing_width: int,
        spacing_color: str,
        image2: Tensor | None = None,
    ) -> io.NodeOutput:
        if image2 is None:
            return io.NodeOutput(image1)
        axis = 2 if direction in ("right", "left") else 1
        count = max(image1.shape[0], image2.shape[0])
        first, second = _last_repeated(image1, count), _last_repeated(image2, count)
        if match_image_size:
            second = _with_side(second, 3 - axis, first.shape[3 - axis])
        first, second = _same_channels(first, second)
        first, second = _same_side(first, second, 3 - axis)
        parts = [first, second] if direction in ("right", "down") else [second, first]
        if spacing_width > 0:
            parts.insert(1, _gap(first, axis, spacing_width, COLOURS[spacing_color]))
        return io.NodeOutput(torch.cat(parts, dim=axis))

    stitch = execute


def _last_repeated(image: Tensor, count: int) -> Tensor:
    """A batch of `count`; the last picture fills up what is missing."""
    missing = count - image.shape[0]
    return image if missing == 0 else torch.cat([image, image[-1:].repeat(missing, 1, 1, 1)])


def _with_side(image: Tensor, axis: int, size: int) -> Tensor:
    """The picture scaled in proportion until the side along `axis` is `size` pixels."""
    rows, columns = image.shape[1], image.shape[2]
    if axis == 1:
        return resized(image, int(size * columns / rows), size, "lanczos", "disabled")
    return resized(image, size, int(size * rows / columns), "lanczos", "disabled")


def _same_channels(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the larger number of channels; a picture without alpha becomes opaque."""
    if first.shape[-1] < second.shape[-1]:
        second, first = node_helpers.image_alpha_fix(second, first)
    else:
        first, second = node_helpers.image_alpha_fix(first, second)
    return first, second


def _same_side(first: Tensor, second: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """The smaller one centred on black until both have the same side along `axis`."""
    size = max(first.shape[axis], second.shape[axis])

    def padded(image: Tensor) -> Tensor:
        missing = size - image.shape[axis]
        before, after = missing // 2, missing - missing // 2
        amounts = (0, 0, 0, 0, before, after) if axis == 1 else (0, 0, before, after)
        return pad(image, amounts) if missing else image

    return padded(first), padded(second)


def _gap(image: Tensor, axis: int, width: int, colour: tuple[float, float, float]) -> Tensor:
    """A strip of one opaque colour, `width` pixels (an even number) along `axis`."""
    shape = list(image.shape)
    shape[axis] = width + width % 2
    strip = torch.ones(shape, dtype=image.dtype, device=image.device)
    strip[..., :3] = torch.tensor(colour)[: min(3, shape[-1])].to(strip)
    return strip


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
        width, height = int(columns * scale), int(rows * scale)
        small = resized(image, width, height, interpolation, "disabled")
        value = 0.0 if padding_color == "black" else 1.0
        canvas = torch.full((count, target_height, target_width, channels), value).to(image)
        top, left = (target_height - height) // 2, (target_width - width) // 2
        canvas[:, top : top + height, left : left + width] = small
        return io.NodeOutput(canvas)

    resize_and_pad = execute


class SaveSVGNode(io.ComfyNode):
    """Saves vector graphics with the workflow inside."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveSVGNode",
            category="image/save",
            description="Saves SVG pictures to the output folder.",
            inputs=[
                io.SVG.Input("svg"),
                io.String.Input("filename_prefix", default="svg/ComfyUI"),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, svg: Any, filename_prefix: str) -> io.NodeOutput:
        folder, filename, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory()
        )
        metadata = svg_metadata(cls.hidden.prompt, cls.hidden.extra_pnginfo)
        results: list[ui.SavedResult] = []
        for number, data in enumerate(svg.data):
            stem = filename.replace("%batch_num%", str(number))
            file = f"{stem}_{counter + number:05}_.svg"
            with open(os.path.join(folder, file), "wb") as target:
                target.write(with_svg_metadata(data.getvalue(), metadata))
            results.append(ui.SavedResult(file, subfolder, io.FolderType.output))
        return io.NodeOutput(ui={"images": results})

    save_svg = execute


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
        height, width = image.shape[1:3]
        if height > width:
            width, height = round(width / height * largest_size), largest_size
        elif width > height:
            height, width = round(height / width * largest_size), largest_size
        else:
            height = width = largest_size
        return io.NodeOutput(resized(image, width, height, upscale_method, "disabled"))


def svg_metadata(prompt: Any, extra: dict[str, Any] | None) -> str | None:
    """The metadata element of a saved SVG, or None when metadata are switched off or absent."""
    import json

    from comfy.cli_args import args

    if args.disable_metadata:
        return None
    content: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
    content.update(extra or {})
    if not content:
        return None
    text = json.dumps(content, indent=4).replace("]]>", "]]]]><![CDATA[>")
    return f"<metadata>\n<![CDATA[\n{text}\n]]>\n</metadata>\n"


def with_svg_metadata(svg: bytes, metadata: str | None) -> bytes:
    """The SVG with the element right after its opening tag; unchanged if it has none."""
    import re

    opening = re.search(rb"<svg\b[^>]*>", svg)
    if metadata is None or opening is None:
        return svg
    end = opening.end()
    return svg[:end] + b"\n" + metadata.encode("utf-8") + svg[end:]


class ImagesExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            ImageCrop,
            RepeatImageBatch,
            ImageFromBatch,
            ImageAddNoise,
            SaveAnimatedWEBP,
            SaveAnimatedPNG,
            SaveSVGNode,
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
