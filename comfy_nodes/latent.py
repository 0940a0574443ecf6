"""Nodes that make, resize, cut, turn and combine latents.

A LATENT is a dict with `samples` [B, C, H, W] (video: [B, C, T, H, W]) and further entries that
travel along. Sizes on the inputs are in pixels; a latent cell of these models covers 8 x 8 of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy import resize
from comfy.devices import memory, placement
from comfy_nodes.latent_basics import (
    CELL,
    Latent,
    batch_indices,
    empty_samples,
    noise_mask_of,
    pixels_input,
    replaced,
    samples_of,
)
from comfy_nodes.latent_joining import LatentBlend, LatentComposite
from comfy_nodes.limits import MAX_RESOLUTION
from comfy_nodes.picture_basics import scaled_sides

UPSCALE_METHODS = ["nearest-exact", "bilinear", "area", "bicubic", "bislerp"]
CROP_METHODS = ["disabled", "center"]


class EmptyLatentImage:
    """A blank latent to start from."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        def side(what: str) -> tuple[str, dict[str, Any]]:
            options = {"default": 512, "min": 16, "max": MAX_RESOLUTION, "step": 8}
            return ("INT", {**options, "tooltip": f"{what} of the picture in pixels."})

        batch = {"default": 1, "min": 1, "max": 4096, "tooltip": "How many pictures at once."}
        return {
            "required": {
                "width": side("Width"),
                "height": side("Height"),
                "batch_size": ("INT", batch),
            }
        }

    RETURN_TYPES = ("LATENT",)
    OUTPUT_TOOLTIPS = ("Blank latents, one per picture.",)
    FUNCTION = "generate"
    CATEGORY = "latent"
    DESCRIPTION = "Makes a batch of blank latents, to be filled by sampling."

    def __init__(self) -> None:
        self.device = placement.intermediate_device()

    def generate(self, width: int, height: int, batch_size: int = 1) -> tuple[Latent]:
        """Zeros [batch, 4, height / 8, width / 8]."""
        shape = (batch_size, 4, height // CELL, width // CELL)
        return ({"samples": empty_samples(shape, self.device)},)


class LatentUpscale:
    """Resizes a latent to a size in pixels."""

    upscale_methods = UPSCALE_METHODS
    crop_methods = CROP_METHODS

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "samples": ("LATENT",),
                "upscale_method": (cls.upscale_methods,),
                "width": pixels_input(512, 0),
                "height": pixels_input(512, 0),
                "crop": (cls.crop_methods,),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "upscale"
    CATEGORY = "latent"

    def upscale(
        self, samples: Latent, upscale_method: str, width: int, height: int, crop: str
    ) -> tuple[Latent]:
        """A side of 0 follows from the other one and the latent's proportions; both 0 changes
        nothing.
        """
        if width == 0 and height == 0:
            return (samples,)
        rows, columns = samples_of(samples, "samples").shape[-2:]
        if width == 0:
            height = max(64, height)
            width = max(64, round(columns * height / rows))
        elif height == 0:
            width = max(64, width)
            height = max(64, round(rows * width / columns))
        else:
            width, height = max(64, width), max(64, height)
        return (
            replaced(
                samples,
                resize.common_upscale(
                    samples["samples"], width // CELL, height // CELL, upscale_method, crop
                ),
            ),
        )


class LatentUpscaleBy:
    """Resizes a latent by a factor."""

    upscale_methods = UPSCALE_METHODS

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        factor = {"default": 1.5, "min": 0.01, "max": 8.0, "step": 0.01}
        return {
            "required": {
                "samples": ("LATENT",),
                "upscale_method": (cls.upscale_methods,),
                "scale_by": ("FLOAT", factor),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "upscale"
    CATEGORY = "latent"

    def upscale(self, samples: Latent, upscale_method: str, scale_by: float) -> tuple[Latent]:
        """Both sides times the factor, rounded to whole cells.

        Raises:
            ValueError: No cell would be left of a side.
        """
        rows, columns = samples_of(samples, "samples").shape[-2:]
        width, height = scaled_sides(columns, rows, scale_by, "scale_by")
        resized = resize.common_upscale(
            samples["samples"], width, height, upscale_method, "disabled"
        )
        return (replaced(samples, resized),)


class LatentFromBatch:
    """Takes a run of latents out of a batch."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "samples": ("LATENT",),
                "batch_index": ("INT", {"default": 0, "min": 0, "max": 63}),
                "length": ("INT", {"default": 1, "min": 1, "max": 64}),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "frombatch"
    CATEGORY = "latent/batch"

    def frombatch(self, samples: Latent, batch_index: int, length: int) -> tuple[Latent]:
        """Items from `batch_index` on, with the indices that choose their noise."""
        count = samples["samples"].shape[0]
        start = min(count - 1, batch_index)
        end = start + min(count - start, length)
        taken = replaced(samples, samples["samples"][start:end].clone())
        mask = noise_mask_of(samples, "samples")
        if mask is not None:
            whole = mask if mask.shape[0] == 1 else resize.repeat_to_batch_size(mask, count)
            taken["noise_mask"] = whole if whole.shape[0] == 1 else whole[start:end].clone()
        taken["batch_index"] = batch_indices(samples)[start:end]
        return (taken,)


class RepeatLatentBatch:
    """Repeats a batch of latents."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        amount = {"default": 1, "min": 1, "max": 64}
        return {"required": {"samples": ("LATENT",), "amount": ("INT", amount)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "repeat"
    CATEGORY = "latent/batch"

    def repeat(self, samples: Latent, amount: int) -> tuple[Latent]:
        """The batch `amount` times over; each repetition gets noise of its own."""
        tensor = samples["samples"]
        shape = (amount * tensor.shape[0], *tensor.shape[1:])
        memory.require_room(shape, "the repeated latent", tensor.device, tensor.dtype)
        repeated = replaced(samples, tensor.repeat(amount, *[1] * (tensor.ndim - 1)))
        mask = noise_mask_of(samples, "samples")
        if mask is not None and mask.shape[0] > 1:
            whole = resize.repeat_to_batch_size(mask, tensor.shape[0])
            repeated["noise_mask"] = whole.repeat(amount, *[1] * (mask.ndim - 1))
        if "batch_index" in samples:
            indices = batch_indices(samples)
            shift = max(indices) - min(indices) + 1
            repeated["batch_index"] = [
                index + shift * turn for turn in range(amount) for index in indices
            ]
        return (repeated,)


class LatentCrop:
    """Cuts a rectangle out of a latent."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "samples": ("LATENT",),
                "width": pixels_input(512, 64),
                "height": pixels_input(512, 64),
                "x": pixels_input(0, 0),
                "y": pixels_input(0, 0),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "crop"
    CATEGORY = "latent/transform"

    def crop(self, samples: Latent, width: int, height: int, x: int, y: int) -> tuple[Latent]:
        """The rectangle; one that lies outside is moved in until at least 8 cells remain."""
        rows, columns = samples["samples"].shape[-2:]
        x, y = max(0, min(x // CELL, columns - 8)), max(0, min(y // CELL, rows - 8))
        cut = samples["samples"][..., y : y + height // CELL, x : x + width // CELL]
        return (replaced(samples, cut),)


class LatentRotate:
    """Turns a latent clockwise."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        turns = ["none", "90 degrees", "180 degrees", "270 degrees"]
        return {"required": {"samples": ("LATENT",), "rotation": (turns,)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "rotate"
    CATEGORY = "latent/transform"

    def rotate(self, samples: Latent, rotation: str) -> tuple[Latent]:
        """Quarter turns clockwise."""
        latent = samples_of(samples, "samples")
        quarters = {"90": 1, "180": 2, "270": 3}.get(rotation.split(" ")[0], 0)
        return (replaced(samples, torch.rot90(latent, k=quarters, dims=[-1, -2])),)


class LatentFlip:
    """Mirrors a latent."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        ways = ["x-axis: vertically", "y-axis: horizontally"]
        return {"required": {"samples": ("LATENT",), "flip_method": (ways,)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "flip"
    CATEGORY = "latent/transform"

    def flip(self, samples: Latent, flip_method: str) -> tuple[Latent]:
        """Upside down (x) or left to right (y)."""
        axis = {"x": -2, "y": -1}[flip_method[0]]
        return (replaced(samples, torch.flip(samples_of(samples, "samples"), dims=[axis])),)


class SetLatentNoiseMask:
    """Chooses which part of a latent sampling may change."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"samples": ("LATENT",), "mask": ("MASK",)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "set_mask"
    CATEGORY = "latent/inpaint"

    def set_mask(self, samples: Latent, mask: Tensor) -> tuple[Latent]:
        """Adds the mask, 1 where the picture is made anew."""
        masked = dict(samples)
        masked["noise_mask"] = mask.reshape(-1, 1, *mask.shape[-2:])
        return (masked,)


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "EmptyLatentImage": EmptyLatentImage,
    "LatentUpscale": LatentUpscale,
    "LatentUpscaleBy": LatentUpscaleBy,
    "LatentFromBatch": LatentFromBatch,
    "RepeatLatentBatch": RepeatLatentBatch,
    "LatentComposite": LatentComposite,
    "LatentBlend": LatentBlend,
    "LatentRotate": LatentRotate,
    "LatentFlip": LatentFlip,
    "LatentCrop": LatentCrop,
    "SetLatentNoiseMask": SetLatentNoiseMask,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "EmptyLatentImage": "Empty Latent Image",
    "LatentUpscale": "Upscale Latent",
    "LatentUpscaleBy": "Upscale Latent By",
    "LatentFromBatch": "Latent From Batch",
    "RepeatLatentBatch": "Repeat Latent Batch",
    "LatentComposite": "Latent Composite",
    "LatentBlend": "Latent Blend",
    "LatentRotate": "Rotate Latent",
    "LatentFlip": "Flip Latent",
    "LatentCrop": "Crop Latent",
    "SetLatentNoiseMask": "Set Latent Noise Mask",
}
