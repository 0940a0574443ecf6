"""VACE for Wan: a control video, of which a mask says what is to be made anew, and a reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from comfy import latent_formats, resize
from comfy_api.latest import io
from comfy_extras.declarations import (
    batch_input,
    frames_input,
    pair_and_latent_outputs,
    pair_inputs,
    pixels_input,
)
from comfy_extras.video_frames import (
    GREY,
    appended,
    blank,
    cells_of,
    encoded_frames,
    frames_at,
    padded_frames,
)
from comfy_nodes.picture_basics import masks_of

CHANNELS, CELL, TIME = 16, 8, 4


def control_latent(vae: Any, video: Tensor, mask: Tensor) -> Tensor:
    """Latents [B, 32, T, H, W] of what is kept and of what is to be made anew.

    Args:
        video: [length, H, W, 3].
        mask: [length, H, W, 1], 1 where something is to be made anew.
    """
    around = video - GREY
    kept, anew = around * (1 - mask) + GREY, around * mask + GREY
    return torch.cat([encoded_frames(vae, part, CHANNELS) for part in (kept, anew)], dim=1)


def mask_cells(mask: Tensor, cells: int) -> Tensor:
    """A mask [length, H, W, 1] as 64 channels, one for each pixel of a cell: [64, T, h, w]."""
    pixels = functional.pixel_unshuffle(mask.movedim(-1, 1), CELL)  # [length, 64, h, w]
    whole = pixels.transpose(0, 1).unsqueeze(0)
    size = (cells, *whole.shape[-2:])
    return functional.interpolate(whole, size=size, mode="nearest-exact").squeeze(0)


def whole_mask(masks: Tensor | None, width: int, height: int, length: int) -> Tensor:
    """Masks at the video's size [length, H, W, 1]; 1 where none was given."""
    whole = torch.ones(length, height, width, 1)
    if masks is not None:
        given = masks_of(masks)[:, None]
        sized = resize.common_upscale(given[:length], width, height, "bilinear", "center")
        whole[: sized.shape[0]] = sized.movedim(1, -1)[..., :1]
    return whole


class WanVaceToVideo(io.ComfyNode):
    """Gives a VACE model its control video, masks and reference picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanVaceToVideo",
            category="conditioning/video_models",
            inputs=[
                *pair_inputs(),
                io.Vae.Input("vae"),
                pixels_input("width", 832),
                pixels_input("height", 480),
                frames_input(81),
                batch_input(),
                io.Float.Input("strength", default=1.0, min=0.0, max=1000.0, step=0.01),
                io.Image.Input("control_video", optional=True),
                io.Mask.Input("control_masks", optional=True),
                io.Image.Input("reference_image", optional=True),
            ],
            outputs=[*pair_and_latent_outputs(), io.Int.Output(display_name="trim_latent")],
        )

    @classmethod
    def execute(
        cls,
        positive: Any,
        negative: Any,
        vae: Any,
        width: int,
        height: int,
        length: int,
        batch_size: int,
        strength: float,
        control_video: Tensor | None = None,
        control_masks: Tensor | None = None,
        reference_image: Tensor | None = None,
    ) -> io.NodeOutput:
        cells, extra = cells_of(length, TIME), 0
        video = padded_frames(control_video, width, height, length)
        mask = whole_mask(control_masks, width, height, length)
        control, places = control_latent(vae, video, mask), mask_cells(mask, cells)
        if reference_image is not None:
            seen = encoded_frames(vae, frames_at(reference_image, width, height, 1), CHANNELS)
            nothing = latent_formats.Wan21().process_out(torch.zeros_like(seen))
            control = torch.cat([torch.cat([seen, nothing], dim=1), control], dim=2)
            extra = seen.shape[2]
            places = torch.cat([torch.zeros_like(places[:, :extra]), places], dim=1)
        values = {
            "vace_frames": [control],
            "vace_mask": [places.unsqueeze(0)],
            "vace_strength": [strength],
        }
        samples = blank(batch_size, CHANNELS, cells + extra, height // CELL, width // CELL)
        return io.NodeOutput(*appended(values, positive, negative), {"samples": samples}, extra)
