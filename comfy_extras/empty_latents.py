"""Empty latents of models whose cells differ from those of Stable Diffusion."""

from __future__ import annotations

from torch import Tensor

from comfy.devices import placement
from comfy_nodes.latent_basics import empty_samples


def empty_image(batch: int, channels: int, height: int, width: int, space: int) -> Tensor:
    """Zeros [B, C, height / space, width / space]; sides in pixels."""
    shape = (batch, channels, height // space, width // space)
    return empty_samples(shape, placement.intermediate_device())


def empty_video(
    batch: int, channels: int, length: int, height: int, width: int, time: int, space: int
) -> Tensor:
    """Zeros [B, C, T, height / space, width / space].

    Args:
        length: Frames; the first has a cell of its own, then `time` frames share one.
        height, width: In pixels; `space` pixels of a side share a cell.
    """
    cells = (length - 1) // time + 1
    shape = (batch, channels, cells, height // space, width // space)
    return empty_samples(shape, placement.intermediate_device())
