"""Pictures ``[B, H, W, C]`` (video ``[B, T, H, W, C]``) as autoencoders take them: their channels
and their size."""

from __future__ import annotations

import torch
from torch import Tensor

COLOURS = 3  # channels of a picture without alpha


def in_colours(pixels: Tensor) -> Tensor:
    """Pictures without transparency; grey ones have the same value in all colours."""
    if pixels.shape[-1] < COLOURS:
        return pixels[..., :1].expand(*pixels.shape[:-1], COLOURS)
    return pixels[..., :COLOURS]


def with_channels(values: Tensor, count: int, filling: float | str | None) -> Tensor:
    """As many channels ``[..., C]`` as an autoencoder takes, where it says what fills the rest.

    Args:
        filling: A value for missing channels; any word repeats the last channel; None leaves
            ``values`` as they are.
    """
    if filling is None or values.shape[-1] == count:
        return values
    missing = max(0, count - values.shape[-1])
    last = values[..., -1:].expand(*values.shape[:-1], missing)
    if not isinstance(filling, str):
        last = torch.full_like(last, filling)
    return torch.cat([values[..., :count], last], dim=-1)


def cropped_to_cells(pixels: Tensor, ratio: float) -> Tensor:
    """Pictures cut to a multiple of the pixels per latent cell, equally on both sides."""
    axes = range(1, pixels.ndim - 1) if pixels.ndim < 5 else range(2, pixels.ndim - 1)
    for axis in axes:
        size = pixels.shape[axis]
        kept = int(size // ratio * ratio)
        if kept != size:
            pixels = pixels.narrow(axis, int(size % ratio) // 2, kept)
    return pixels
