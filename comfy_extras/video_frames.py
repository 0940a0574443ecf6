"""What nodes for video models share: frames at a size, and latents of the first and last ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import node_helpers
from comfy import resize
from comfy.devices import memory, placement
from comfy_nodes.latent_basics import empty_samples

GREY = 0.5  # what frames nobody gave are filled with

Conditioning = list[list[Any]]


def frames_at(images: Tensor, width: int, height: int, count: int | None = None) -> Tensor:
    """The first `count` pictures [B, H, W, C] in three channels at a size, cropped to fit."""
    pixels = images[:count, ..., :3].movedim(-1, 1)
    return resize.common_upscale(pixels, width, height, "bilinear", "center").movedim(1, -1)


def encoded_frames(vae: Any, frames: Tensor, channels: int) -> Tensor:
    """The latent [B, `channels`, T, h, w] of a video's frames [T, H, W, 3].

    Raises:
        ValueError: The autoencoder makes other latents: it belongs to another model.
    """
    latent: Tensor = vae.encode(frames)
    if latent.ndim != 5 or latent.shape[1] != channels:
        found = "a picture autoencoder" if latent.ndim != 5 else f"one with {latent.shape[1]}"
        raise ValueError(
            f"vae: expected a video autoencoder with latents of {channels} channels, found "
            f"{found}; connect that of the model that this node is for"
        )
    return latent


def padded_frames(images: Tensor | None, width: int, height: int, length: int) -> Tensor:
    """A video [length, H, W, 3] that begins with some pictures and is grey from there on."""
    memory.require_room((length, height, width, 3), "a video")
    video = torch.full((length, height, width, 3), GREY)
    if images is not None:
        frames = frames_at(images, width, height, length)
        video[: frames.shape[0]] = frames
    return video


def cells_of(frames: int, time: int) -> int:
    """Latent cells of some frames: one for the first, then `time` frames share one."""
    return (frames - 1) // time + 1


def blank(batch: int, channels: int, cells: int, height: int, width: int) -> Tensor:
    """Zeros [B, C, T, H, W] where nodes keep their results."""
    return empty_samples((batch, channels, cells, height, width), placement.intermediate_device())


def with_values(values: dict[str, Any], *conditionings: Conditioning) -> list[Conditioning]:
    """Each conditioning with the same options set."""
    return [node_helpers.conditioning_set_values(one, values) for one in conditionings]


def appended(values: dict[str, Any], *conditionings: Conditioning) -> list[Conditioning]:
    """Each conditioning with lists added to those it has."""
    return [node_helpers.conditioning_set_values(one, values, append=True) for one in conditionings]
