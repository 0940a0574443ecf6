"""Nodes between pictures and latents: the autoencoder, whole or in tiles, with or without a
mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import node_helpers
from comfy_nodes.conditioning import Conditioning
from comfy_nodes.latent_basics import Latent
from comfy_nodes.picture_basics import check_count, colours_of, masks_of

PICTURE_AXES = (4, 5)  # of pictures, and of videos


class VAEDecode:
    """Latent to picture."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "samples": ("LATENT", {"tooltip": "Latents to decode."}),
                "vae": ("VAE", {"tooltip": "Autoencoder that belongs to the model."}),
            }
        }

    RETURN_TYPES = ("IMAGE",)
    OUTPUT_TOOLTIPS = ("The pictures.",)
    FUNCTION = "decode"
    CATEGORY = "latent"
    DESCRIPTION = "Decodes latents into pictures."

    def decode(self, vae: Any, samples: Latent) -> tuple[Tensor]:
        """Pictures [B, H, W, C]; the frames of a video become items of the batch."""
        return (frames_as_batch(vae.decode(pictures_of(samples, vae))),)


class VAEDecodeTiled:
    """Latent to picture, tile by tile."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "samples": ("LATENT",),
                "vae": ("VAE",),
                **tile_inputs(step=32),
            }
        }

    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "decode"
    CATEGORY = "_for_testing"

    def decode(
        self,
        vae: Any,
        samples: Latent,
        tile_size: int,
        overlap: int = 64,
        temporal_size: int = 64,
        temporal_overlap: int = 8,
    ) -> tuple[Tensor]:
        """Tiles of `tile_size` pixels that overlap by at most a quarter of that."""
        latent = pictures_of(samples, vae)
        overlap = min(overlap, tile_size // 4)
        time_tile, time_overlap = None, None
        ratio = vae.temporal_compression_decode()
        if ratio is not None:
            if temporal_overlap > temporal_size // 2:
                temporal_overlap //= 2
            time_tile = max(2, temporal_size // ratio)
            time_overlap = max(1, min(time_tile // 2, temporal_overlap // ratio))
        space = vae.spacial_compression_decode()
        images = vae.decode_tiled(
            latent,
            tile_x=tile_size // space,
            tile_y=tile_size // space,
            overlap=overlap // space,
            tile_t=time_tile,
            overlap_t=time_overlap,
        )
        return (frames_as_batch(images),)


class VAEEncode:
    """Picture to latent."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"pixels": ("IMAGE",), "vae": ("VAE",)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "encode"
    CATEGORY = "latent"

    def encode(self, vae: Any, pixels: Tensor) -> tuple[Latent]:
        """Latents of pictures [B, H, W, C]."""
        return ({"samples": vae.encode(pixels)},)


class VAEEncodeTiled:
    """Picture to latent, tile by tile."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"pixels": ("IMAGE",), "vae": ("VAE",), **tile_inputs(step=64)}}

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "encode"
    CATEGORY = "_for_testing"

    def encode(
        self,
        vae: Any,
        pixels: Tensor,
        tile_size: int,
        overlap: int = 64,
        temporal_size: int = 64,
        temporal_overlap: int = 8,
    ) -> tuple[Latent]:
        """Tiles of `tile_size` pixels; they overlap by a quarter where they are too small for
        `overlap`.
        """
        cell = vae.spacial_compression_encode()
        if overlap >= tile_size // 2:  # tiles of half that size, too, are tried
            overlap = tile_size // 4
        # In whole cells, so that no tile at an edge is less than one.
        tile_size, overlap = (max(cell, tile_size // cell * cell), overlap // cell * cell)
        latent = vae.encode_tiled(
            pixels,
            tile_x=tile_size,
            tile_y=tile_size,
            overlap=overlap,
            tile_t=temporal_size,
            overlap_t=temporal_overlap,
        )
        return ({"samples": latent},)


class VAEEncodeForInpaint:
    """Picture to latent, with the masked part made neutral."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        grow = {"default": 6, "min": 0, "max": 64, "step": 1}
        return {
            "required": {
                "pixels": ("IMAGE",),
                "vae": ("VAE",),
                "mask": ("MASK",),
                "grow_mask_by": ("INT", grow),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "encode"
    CATEGORY = "latent/inpaint"

    def encode(
        self, vae: Any, pixels: Tensor, mask: Tensor, grow_mask_by: int = 6
    ) -> tuple[Latent]:
        """The masked part becomes mid grey; sampling may change it and `grow_mask_by` pixels
        around.
        """
        ratio = vae.spacial_compression_encode()
        pixels, mask = fit_mask(pixels, mask, ratio)
        latent = vae.encode(grey_out(pixels, mask))
        return ({"samples": latent, "noise_mask": _grow(mask, grow_mask_by).round()},)


class InpaintModelConditioning:
    """Gives an inpainting model the picture and the mask."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        noise_mask = {
            "default": True,
            "tooltip": "Let sampling change only the masked part, whatever the model does.",
        }
        return {
            "required": {
                "positive": ("CONDITIONING",),
                "negative": ("CONDITIONING",),
                "vae": ("VAE",),
                "pixels": ("IMAGE",),
                "mask": ("MASK",),
                "noise_mask": ("BOOLEAN", noise_mask),
            }
        }

    RETURN_TYPES = ("CONDITIONING", "CONDITIONING", "LATENT")
    RETURN_NAMES = ("positive", "negative", "latent")
    FUNCTION = "encode"
    CATEGORY = "conditioning/inpaint"

    def encode(
        self,
        positive: Conditioning,
        negative: Conditioning,
        pixels: Tensor,
        vae: Any,
        mask: Tensor,
        noise_mask: bool = True,
    ) -> tuple[Conditioning, Conditioning, Latent]:
        """Both conditionings with the masked picture, and the latent of the whole one."""
        pixels, mask = fit_mask(pixels, mask, cell=8)
        values = {"concat_latent_image": vae.encode(grey_out(pixels, mask)), "concat_mask": mask}
        latent: Latent = {"samples": vae.encode(pixels)}
        if noise_mask:
            latent["noise_mask"] = mask
        set_values = node_helpers.conditioning_set_values
        return (set_values(positive, values), set_values(negative, values), latent)


def tile_inputs(step: int) -> dict[str, Any]:
    """Declarations of tile size and overlap, in pixels and frames."""

    def frames(default: int, least: int, tooltip: str) -> tuple[str, dict[str, Any]]:
        limits = {"default": default, "min": least, "max": 4096, "step": 4}
        return ("INT", {**limits, "tooltip": f"Video only: {tooltip}"})

    return {
        "tile_size": ("INT", {"default": 512, "min": 64, "max": 4096, "step": step}),
        "overlap": ("INT", {"default": 64, "min": 0, "max": 4096, "step": 32}),
        "temporal_size": frames(64, 8, "frames per tile."),
        "temporal_overlap": frames(8, 4, "frames that neighbouring tiles share."),
    }


def pictures_of(samples: Latent, vae: Any) -> Tensor:
    """The latent of pictures or a video; the first of several together, such as video and sound.

    Raises:
        ValueError: It is one of sound, and the autoencoder makes pictures.
    """
    latent: Any = samples["samples"]
    first: Tensor = latent.unbind()[0] if getattr(latent, "is_nested", False) else latent
    if getattr(vae, "latent_dim", 1) > 1 and first.ndim < 4:
        raise ValueError(
            "samples: expected a latent of pictures, [batch, channels, height, width], as this VAE "
            f"decodes them, found one of shape {tuple(first.shape)}; one of sound is decoded by "
            "VAE Decode Audio"
        )
    return first


def frames_as_batch(images: Tensor) -> Tensor:
    """[B, T, H, W, C] -> [B * T, H, W, C]; pictures stay as they are.

    Raises:
        ValueError: They are none, but what an autoencoder of sounds made.
    """
    if images.ndim not in PICTURE_AXES:
        raise ValueError(
            "vae: expected an autoencoder of pictures, found one whose results are no pictures "
            f"(shape {list(images.shape)}); sounds are decoded by VAEDecodeAudio or "
            "LTXVAudioVAEDecode"
        )
    return images.reshape(-1, *images.shape[-3:]) if images.ndim == 5 else images


def check_sides(pixels: Tensor, cell: int) -> None:
    """Refuse pictures [B, H, W, C] that have a side of less than one cell.

    Raises:
        ValueError: They have.
    """
    rows, columns = pixels.shape[1], pixels.shape[2]
    if min(rows, columns) < cell:
        raise ValueError(
            f"pixels: expected sides of at least {cell} pixels, found {columns} x {rows}; enlarge "
            "the picture"
        )


def fit_mask(pixels: Tensor, mask: Tensor, cell: int) -> tuple[Tensor, Tensor]:
    """Brings picture and mask to one size, a multiple of the autoencoder's cell, cropping evenly.

    Args:
        pixels: [B, H, W, C].
        mask: [B, H', W'] or [H', W'].

    Returns:
        The cropped picture and the mask [B, 1, H, W], resized and cropped alike.

    Raises:
        ValueError: There are neither one nor B masks, or the picture is smaller than a cell.
    """
    check_sides(pixels, cell)
    rows, columns = pixels.shape[1], pixels.shape[2]
    mask = masks_of(mask).unsqueeze(1)
    check_count(mask.shape[0], pixels.shape[0], "mask", "mask", "pixels")
    mask = torch.nn.functional.interpolate(mask, size=(rows, columns), mode="bilinear")
    height, width = rows // cell * cell, columns // cell * cell
    top, left = (rows - height) // 2, (columns - width) // 2
    window = (slice(top, top + height), slice(left, left + width))
    return pixels[:, window[0], window[1], :], mask[:, :, window[0], window[1]]


def grey_out(pixels: Tensor, mask: Tensor) -> Tensor:
    """The picture with mid grey where the mask [B, 1, H, W] is 0.5 or more."""
    keep = (1.0 - mask.round()).squeeze(1).unsqueeze(-1)
    colours = (colours_of(pixels) - 0.5) * keep + 0.5
    return torch.cat([colours, pixels[..., 3:]], dim=-1)


def _grow(mask: Tensor, amount: int) -> Tensor:
    """The mask [B, 1, H, W] widened by about half of `amount` pixels on every side."""
    if amount == 0:
        return mask
    kernel = torch.ones((1, 1, amount, amount), dtype=mask.dtype, device=mask.device)
    padding = -(-(amount - 1) // 2)
    rows, columns = mask.shape[-2:]
    grown = torch.nn.functional.conv2d(mask.round(), kernel, padding=padding).clamp(0, 1)
    return grown[..., :rows, :columns]


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "VAEDecode": VAEDecode,
    "VAEEncode": VAEEncode,
    "VAEEncodeForInpaint": VAEEncodeForInpaint,
    "VAEDecodeTiled": VAEDecodeTiled,
    "VAEEncodeTiled": VAEEncodeTiled,
    "InpaintModelConditioning": InpaintModelConditioning,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "VAEDecode": "VAE Decode",
    "VAEEncode": "VAE Encode",
    "VAEEncodeForInpaint": "VAE Encode (for Inpainting)",
    "VAEDecodeTiled": "VAE Decode (Tiled)",
    "VAEEncodeTiled": "VAE Encode (Tiled)",
}
