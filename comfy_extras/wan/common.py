"""What the nodes for Wan share.

The models see what is given as latents beside the noisy one: 16 channels (48 in the small 2.2
model), with a mask of four channels, one for each frame that shares a latent cell.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy import latent_formats
from comfy_api.latest import io
from comfy_extras.declarations import (
    batch_input,
    frames_input,
    pair_inputs,
    pixels_input,
)
from comfy_extras.empty_latents import empty_video
from comfy_extras.video_frames import blank, encoded_frames, frames_at

Latent = dict[str, Any]
CHANNELS, CELL, TIME = 16, 8, 4  # of a latent; pixels of a side, and frames, that share a cell
WAN22_CHANNELS, WAN22_CELL = 48, 16


def video_inputs(length: int = 81) -> list[io.Input]:
    """The conditionings, the autoencoder, and size, length and number of the videos."""
    return [*pair_inputs(), io.Vae.Input("vae"), *size_inputs(length)]


def size_inputs(length: int = 81) -> list[io.Input]:
    """Size, length and number of the videos."""
    return [
        pixels_input("width", 832),
        pixels_input("height", 480),
        frames_input(length),
        batch_input(),
    ]


def vision_input(id: str = "clip_vision_output") -> io.ClipVisionOutput.Input:
    """What an image encoder saw."""
    return io.ClipVisionOutput.Input(id, optional=True)


def image_input(id: str) -> io.Image.Input:
    """A picture or video that may be given."""
    return io.Image.Input(id, optional=True)


def empty(batch: int, width: int, height: int, length: int) -> Tensor:
    """An empty latent."""
    return empty_video(batch, CHANNELS, length, height, width, TIME, CELL)


def neutral(channels: int, cells: int, rows: int, columns: int, batch: int = 1) -> Tensor:
    """The autoencoder's latent of what is zero in the network's space.

    Raises:
        ValueError: No model of the family has an autoencoder of so many channels.
    """
    formats = {CHANNELS: latent_formats.Wan21, WAN22_CHANNELS: latent_formats.Wan22}
    if channels not in formats:
        raise ValueError(
            f"vae: expected a video autoencoder with latents of {CHANNELS} or {WAN22_CHANNELS} "
            f"channels, found one with {channels}; connect that of the model that this node is for"
        )
    return formats[channels]().process_out(blank(batch, channels, cells, rows, columns))


def beginning_with(
    images: Tensor | None, latent: Tensor, vae: Any, width: int, height: int, length: int
) -> Tensor:
    """A copy of a latent whose first cells are those of some pictures, if there are any."""
    begun = latent.clone()
    if images is not None:
        frames = frames_at(images, width, height, length)
        encoded = encoded_frames(vae, frames, latent.shape[1])
        begun[:, :, : encoded.shape[2]] = encoded[:, :, : latent.shape[2]]
    return begun


def frame_mask(cells: int, rows: int, columns: int, given: list[slice]) -> Tensor:
    """[1, 4, T, H, W]: 0 for frames that are given, 1 for others.

    Args:
        given: Parts of the 4 * T frames, the first of which counts four times.
    """
    mask = torch.ones(1, 1, cells * TIME, rows, columns)
    for part in given:
        mask[:, :, part] = 0.0
    return mask.reshape(1, cells, TIME, rows, columns).transpose(1, 2)
