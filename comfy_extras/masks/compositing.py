"""Pastes latents and pictures into others, weighted by a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

import node_helpers
from comfy import resize
from comfy_api.latest import io
from comfy_nodes.latent_basics import check_alike, samples_of
from comfy_nodes.limits import MAX_RESOLUTION
from comfy_nodes.picture_basics import masks_of

CELL = 8  # pixels per latent cell and axis


def composite(
    destination: Tensor,
    source: Tensor,
    x: int,
    y: int,
    mask: Tensor | None = None,
    multiplier: int = CELL,
    resize_source: bool = False,
) -> Tensor:
    """Pastes one batch into another and returns the changed `destination`.

    Args:
        destination: [B, C, H, W], or of a video [B, C, T, H, W]; changed in place.
        source: [B', C, H', W'], or [B', C, T, H', W'].
        x, y: Where its left upper corner lies, in units of 1 / `multiplier` cells.
        mask: Weight of the source [B'', H'', W''], resized to it; None pastes all of it.
        resize_source: Stretch the source over the whole destination first.
    """
    source = source.to(destination.device)
    if resize_source:
        rows, columns = destination.shape[-2:]
        source = resize.common_upscale(source, columns, rows, "bilinear", "disabled")
    source = resize.repeat_to_batch_size(source, destination.shape[0])
    rows, columns = source.shape[-2:]
    top, left = y // multiplier, x // multiplier
    first_row, first_column = max(0, -top), max(0, -left)
    last_row = min(rows, destination.shape[-2] - top)
    last_column = min(columns, destination.shape[-1] - left)
    if last_row <= first_row or last_column <= first_column:
        return destination
    weight = _weight(mask, source)[..., first_row:last_row, first_column:last_column]
    part = source[..., first_row:last_row, first_column:last_column]
    below = (
        ...,
        slice(top + first_row, top + last_row),
        slice(left + first_column, left + last_column),
    )
    destination[below] = part * weight + destination[below] * (1.0 - weight)
    return destination


def _weight(mask: Tensor | None, source: Tensor) -> Tensor:
    """Weight of each cell of the source [B, 1, (1,) H, W]."""
    if mask is None:
        return torch.ones_like(source[:, :1])
    flat = masks_of(mask).unsqueeze(1).to(source.device)
    flat = interpolate(flat, size=source.shape[-2:], mode="bilinear")
    weight = resize.repeat_to_batch_size(flat, source.shape[0])
    return weight.unsqueeze(2) if source.ndim == 5 else weight


def position(id: str, step: int = 1) -> io.Int.Input:
    """Declaration of a position in pixels."""
    return io.Int.Input(id, default=0, min=0, max=MAX_RESOLUTION, step=step)


class LatentCompositeMasked(io.ComfyNode):
    """Pastes a latent into another, through a mask."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LatentCompositeMasked",
            category="latent",
            inputs=[
                io.Latent.Input("destination"),
                io.Latent.Input("source"),
                position("x", CELL),
                position("y", CELL),
                io.Boolean.Input("resize_source", default=False),
                io.Mask.Input("mask", optional=True),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(
        cls,
        destination: dict[str, Any],
        source: dict[str, Any],
        x: int,
        y: int,
        resize_source: bool,
        mask: Tensor | None = None,
    ) -> io.NodeOutput:
        target = samples_of(destination, "destination").clone()
        check_alike(target.shape, source["samples"], "source")
        pasted = composite(target, source["samples"], x, y, mask, CELL, resize_source)
        return io.NodeOutput({**destination, "samples": pasted})


class ImageCompositeMasked(io.ComfyNode):
    """Pastes a picture into another, through a mask."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageCompositeMasked",
            category="image",
            inputs=[
                io.Image.Input("destination"),
                io.Image.Input("source"),
                position("x"),
                position("y"),
                io.Boolean.Input("resize_source", default=False),
                io.Mask.Input("mask", optional=True),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(
        cls,
        destination: Tensor,
        source: Tensor,
        x: int,
        y: int,
        resize_source: bool,
        mask: Tensor | None = None,
    ) -> io.NodeOutput:
        destination, source = node_helpers.image_alpha_fix(destination, source)
        target = destination.clone().movedim(-1, 1)
        pasted = composite(target, source.movedim(-1, 1), x, y, mask, 1, resize_source)
        return io.NodeOutput(pasted.movedim(1, -1))

    composite = execute
