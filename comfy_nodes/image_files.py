"""Nodes that read pictures from the input folder and write them to the output and preview
folders.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import string
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, ImageSequence, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

import folder_paths
import node_helpers
from comfy.cli_args import args
from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.sampling.environment import environment
from comfy_api.internal.watched_file import watched_file
from comfy_api.latest.ui.metadata import with_latin_names

ROWS_AT_ONCE = 256  # of a picture that is converted: a cancellation is noticed in between
SHOWN_BYTES = 12  # of a file that is no picture, in the error about it
NO_ALPHA_SIZE = 64  # side of the blank mask that stands for "this picture has no transparency"


def input_images() -> list[str]:
    """Names of the pictures in the input folder, sorted."""
    folder = folder_paths.get_input_directory()
    if not os.path.isdir(folder):
        return []
    names = [name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name))]
    return sorted(folder_paths.filter_files_content_types(names, ["image"]))


class LoadImage:
    """Reads a picture and its transparency."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": (input_images(), {"image_upload": True})}}

    RETURN_TYPES = ("IMAGE", "MASK")
    FUNCTION = "load_image"
    CATEGORY = "image"

    def load_image(self, image: str) -> tuple[Tensor, Tensor]:
        """Pictures [B, H, W, 3], one per frame, and masks [B, H, W], 1 where a picture is
        transparent.

        Args:
            image: Name in the input folder, or `name [output]` and the like.

        Raises:
            ValueError: The file is no picture that can be read.
        """
        pictures: list[Tensor] = []
        masks: list[Tensor] = []
        with _opened(image) as opened:
            for frame in ImageSequence.Iterator(opened):
                upright = node_helpers.pillow(ImageOps.exif_transpose, frame)
                if pictures and pictures[0].shape[1:3] != (upright.height, upright.width):
                    continue  # a thumbnail or another page, not a frame of the same picture
                pictures.append(_colours(upright))
                masks.append(_transparency(upright))
                if opened.format == "MPO":
                    break  # the further frames are views for 3D displays
        return (torch.cat(pictures), torch.cat(masks))

    @classmethod
    def IS_CHANGED(cls, image: str) -> str:
        return node_helpers.file_digest(folder_paths.get_annotated_filepath(image))

    @classmethod
    def VALIDATE_INPUTS(cls, image: str) -> bool | str:
        if not folder_paths.exists_annotated_filepath(image):
            return f"Invalid image file: {image}"
        return True


class LoadImageMask:
    """Reads one channel of a picture as a mask."""

    _color_channels = ("alpha", "red", "green", "blue")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "image": (input_images(), {"image_upload": True}),
                "channel": (list(cls._color_channels),),
            }
        }

    RETURN_TYPES = ("MASK",)
    FUNCTION = "load_image"
    CATEGORY = "mask"

    def load_image(self, image: str, channel: str) -> tuple[Tensor]:
        """The channel as a mask [1, H, W]; the alpha channel is inverted, so that 1 is
        transparent.

        Raises:
            ValueError: The file is no picture that can be read.
        """
        with _opened(image) as opened:
            picture = _in_eight_bits(node_helpers.pillow(ImageOps.exif_transpose, opened))
            if channel == "alpha":
                return (_transparency(picture),)
            letter = channel[0].upper()
            values = node_helpers.load_pixels(picture, "RGB").getchannel(letter)
        return (_unit_range(values).unsqueeze(0),)

    @classmethod
    def IS_CHANGED(cls, image: str, channel: str) -> str:  # noqa: ARG003 - called by name
        return node_helpers.file_digest(folder_paths.get_annotated_filepath(image))

    @classmethod
    def VALIDATE_INPUTS(cls, image: str) -> bool | str:
        return LoadImage.VALIDATE_INPUTS(image)


class LoadImageOutput(LoadImage):
    """Reads a picture that was saved earlier."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        remote = {
            "route": "/internal/files/output",
            "refresh_button": True,
            "control_after_refresh": "first",
        }
        options = {"image_upload": True, "image_folder": "output", "remote": remote}
        return {"required": {"image": ("COMBO", options)}}

    DESCRIPTION = "Loads a picture from the output folder. The list is renewed with its button."
    EXPERIMENTAL = True


class SaveImage:
    """Writes pictures to the output folder."""

    def __init__(self) -> None:
        self.output_dir = folder_paths.get_output_directory()
        self.type = "output"
        self.prefix_append = ""
        self.compress_level = 4

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        prefix = {
            "default": "ComfyUI",
            "tooltip": "Start of the file names. %width%, %year% and others are filled in.",
        }
        return {
            "required": {
                "images": ("IMAGE", {"tooltip": "Pictures to save."}),
                "filename_prefix": ("STRING", prefix),
            },
            "hidden": {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        }

    RETURN_TYPES = ()
    FUNCTION = "save_images"
    OUTPUT_NODE = True
    CATEGORY = "image"
    DESCRIPTION = "Saves pictures to the output folder, with the workflow that made them inside."

    def save_images(
        self,
        images: Tensor,
        filename_prefix: str = "ComfyUI",
        prompt: dict[str, Any] | None = None,
        extra_pnginfo: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Writes one PNG per picture and returns their names for the browser."""
        height, width = images[0].shape[0], images[0].shape[1]
        folder, filename, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix + self.prefix_append, self.output_dir, width, height
        )
        metadata = None if args.disable_metadata else png_text(prompt, extra_pnginfo)
        results = []
        for number, image in enumerate(images):
            stem = filename.replace("%batch_num%", str(number))
            file = f"{stem}_{counter + number:05}_.png"
            with watched_file(os.path.join(folder, file)) as target:
                to_picture(image).save(
                    target, format="PNG", pnginfo=metadata, compress_level=self.compress_level
                )
            results.append({"filename": file, "subfolder": subfolder, "type": self.type})
        return {"ui": {"images": results}}


class PreviewImage(SaveImage):
    """Shows pictures without keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self.output_dir = folder_paths.get_temp_directory()
        self.type = "temp"
        # A name of its own for each node, so that previews of two nodes do not replace each other.
        self.prefix_append = "_temp_" + "".join(random.choices(string.ascii_lowercase, k=5))
        self.compress_level = 1

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {"images": ("IMAGE",)},
            "hidden": {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        }

    DESCRIPTION = "Shows the pictures in the editor. They are deleted when the server starts again."


def png_text(prompt: dict[str, Any] | None, extra: dict[str, Any] | None) -> PngInfo:
    """Text chunks of a PNG, as JSON: the prompt, each further entry, and what it was made on."""
    text = PngInfo()
    if prompt is not None:
        text.add_text("prompt", json.dumps(prompt))
    for name, value in with_latin_names(extra or {}).items():
        text.add_text(name, json.dumps(value))
    text.add_text("environment", json.dumps(environment()))
    return text


def to_picture(image: Tensor) -> Image.Image:
    """A picture [H, W, C] with values 0..1 in eight bits; values outside are clipped.

    Raises:
        InterruptProcessingException: The prompt was cancelled.
    """
    values = np.empty(tuple(image.shape), np.uint8)
    for top in range(0, len(image), ROWS_AT_ONCE):
        throw_exception_if_processing_interrupted()
        rows = slice(top, top + ROWS_AT_ONCE)
        values[rows] = np.clip(255.0 * image[rows].cpu().float().numpy(), 0, 255).astype(np.uint8)
    return Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values)


@contextlib.contextmanager
def _opened(name: str) -> Iterator[Image.Image]:
    """A picture of the input folder, to be decoded in the block.

    Raises:
        ValueError: The file is no picture that can be read; the text says what it begins with.
    """
    path = folder_paths.get_annotated_filepath(name)
    try:
        with node_helpers.pillow(Image.open, path) as opened:
            yield opened
    except (UnidentifiedImageError, Image.DecompressionBombError, SyntaxError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        with contextlib.suppress(OSError), open(path, "rb") as file:
            start = file.read(SHOWN_BYTES)
            found = f"a file that begins with {start!r}" if start else "an empty file"
            raise ValueError(
                f"image: expected a picture (PNG, JPEG, WebP, GIF, ...), found {found}: {name} "
                f"cannot be read ({error}); choose another one or save it again"
            ) from error
        raise ValueError(f"image: {name} cannot be read ({error}); choose another one") from error


def _unit_range(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture).astype(np.float32) / 255.0)


def _in_eight_bits(picture: Image.Image) -> Image.Image:
    """Pictures of 16 bits per value, which Pillow would clip rather than scale, in eight."""
    if picture.mode in ("I", "I;16", "I;16B", "I;16L"):
        return picture.point(lambda value: value * (1 / 256)).convert("L")
    return picture


def _colours(picture: Image.Image) -> Tensor:
    """Colours [1, H, W, 3]; transparent pixels keep the colour they have underneath."""
    return _unit_range(node_helpers.load_pixels(_in_eight_bits(picture), "RGB")).unsqueeze(0)


def _transparency(picture: Image.Image) -> Tensor:
    """Mask [1, H, W], 1 where transparent; a small blank one if the picture has no transparency."""
    if "A" in picture.getbands():
        alpha = picture.getchannel("A")
    elif "transparency" in picture.info:
        alpha = node_helpers.load_pixels(picture, "RGBA").getchannel("A")
    else:
        return torch.zeros(1, NO_ALPHA_SIZE, NO_ALPHA_SIZE)
    return 1.0 - _unit_range(alpha).unsqueeze(0)


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "SaveImage": SaveImage,
    "PreviewImage": PreviewImage,
    "LoadImage": LoadImage,
    "LoadImageMask": LoadImageMask,
    "LoadImageOutput": LoadImageOutput,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "SaveImage": "Save Image",
    "PreviewImage": "Preview Image",
    "LoadImage": "Load Image",
    "LoadImageMask": "Load Image (as Mask)",
    "LoadImageOutput": "Load Image (from Outputs)",
}
