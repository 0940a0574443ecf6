"""Nodes that make, resize, cut, turn and combine latents.

A LATENT is a dict with `samples` [B, C, H, W] (video: [B, C, T, H, W]) and further entries that
travel along. Sizes on the inputs are in pixels; a latent cell of these models covers 8 x 8 of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy import resize
from comfy.devices import placement
from comfy_nodes.limits import MAX_RESOLUTION

Latent = dict[str, Any]

CELL = 8  # pixels per latent cell and axis
UPSCALE_METHODS = ["nearest-exact", "bilinear", "area", "bicubic", "bislerp"]
CROP_METHODS = ["disabled", "center"]


def pixels_input(default: int, least: int, step: int = CELL) -> tuple[str, dict[str, int]]:
    """Declaration of a size or position in pixels."""
    return ("INT", {"default": default, "min": least, "max": MAX_RESOLUTION, "step": step})


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
        return ({"samples": torch.zeros(shape, device=self.device)},)


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
        rows, columns = samples["samples"].shape[-2:]
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
        """Both sides times the factor, rounded to whole cells."""
        rows, columns = samples["samples"].shape[-2:]
        width, height = round(columns * scale_by), round(rows * scale_by)
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
        mask = samples.get("noise_mask")
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
        repeated = replaced(samples, tensor.repeat(amount, *[1] * (tensor.ndim - 1)))
        mask = samples.get("noise_mask")
        if mask is not None and mask.shape[0] > 1:
            whole = resize.repeat_to_batch_size(mask, tensor.shape[0])
            repeated["noise_mask"] = whole.repeat(amount, *[1] * (mask.ndim - 1))
        if "batch_index" in samples:
            indices = samples["batch_index"]
            shift = max(indices) - min(indices) + 1
            repeated["batch_index"] = [
                index + shift * turn for turn in range(amount) for index in indices
            ]
        return (repeated,)


class LatentComposite:
    """Pastes one latent into another."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "samples_to": ("LATENT",),
                "samples_from": ("LATENT",),
                "x": pixels_input(0, 0),
                "y": pixels_input(0, 0),
                "feather": pixels_input(0, 0),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "composite"
    CATEGORY = "latent"

    def composite(
        self,
        samples_to: Latent,
        samples_from: Latent,
        x: int,
        y: int,
        composite_method: str = "normal",  # noqa: ARG002 - public signature
        feather: int = 0,
    ) -> tuple[Latent]:
        """`samples_from` at (x, y); edges that lie inside the picture fade over `feather`
        pixels.
        """
        x, y, feather = x // CELL, y // CELL, feather // CELL
        target = samples_to["samples"].clone()
        source = samples_from["samples"][..., : target.shape[-2] - y, : target.shape[-1] - x]
        if 0 in source.shape:
            return (replaced(samples_to, target),)
        rows, columns = source.shape[-2:]
        mask = _feathered(source, feather, x, y, target.shape[-2:])
        window = (..., slice(y, y + rows), slice(x, x + columns))
        target[window] = source * mask + target[window] * (1.0 - mask)
        return (replaced(samples_to, target),)


class LatentBlend:
    """Mixes two latents."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        factor = {"default": 0.5, "min": 0, "max": 1, "step": 0.01}
        return {
            "required": {
                "samples1": ("LATENT",),
                "samples2": ("LATENT",),
                "blend_factor": ("FLOAT", factor),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "blend"
    CATEGORY = "_for_testing"

    def blend(
        self, samples1: Latent, samples2: Latent, blend_factor: float, blend_mode: str = "normal"
    ) -> tuple[Latent]:
        """samples1 * factor + samples2 * (1 - factor).

        Raises:
            ValueError: `blend_mode` is not "normal".
        """
        if blend_mode != "normal":
            raise ValueError(f"unknown blend mode {blend_mode!r}; known: normal")
        first, second = samples1["samples"], samples2["samples"]
        if first.shape != second.shape:
            columns, rows = first.shape[3], first.shape[2]
            second = resize.common_upscale(second, columns, rows, "bicubic", "center")
        return (replaced(samples1, first * blend_factor + second * (1 - blend_factor)),)


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
        quarters = {"90": 1, "180": 2, "270": 3}.get(rotation.split(" ")[0], 0)
        return (replaced(samples, torch.rot90(samples["samples"], k=quarters, dims=[3, 2])),)


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
        axis = {"x": 2, "y": 3}[flip_method[0]]
        return (replaced(samples, torch.flip(samples["samples"], dims=[axis])),)


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


def replaced(latent: Latent, samples: Tensor) -> Latent:
    """The latent dict with other samples; all further entries stay."""
    return {**latent, "samples": samples}


def batch_indices(latent: Latent) -> list[int]:
    """Index of each item in the batch its noise is drawn for."""
    return list(latent.get("batch_index", range(latent["samples"].shape[0])))


def _feathered(
    source: Tensor, feather: int, x: int, y: int, target_size: tuple[int, ...]
) -> Tensor:
    """Weight of `source` placed at (x, y): 1, falling off over `feather` cells at inner edges."""
    mask = torch.ones_like(source)
    rows, columns = source.shape[-2:]
    for step in range(feather):
        weight = (step + 1) / feather
        if y != 0 and step < rows:
            mask[..., step, :] *= weight
        if y + rows < target_size[0] and step < rows:
            mask[..., rows - 1 - step, :] *= weight
        if x != 0 and step < columns:
            mask[..., :, step] *= weight
        if x + columns < target_size[1] and step < columns:
            mask[..., :, columns - 1 - step] *= weight
    return mask


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
