"""What the VAE class has to know about a kind of autoencoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Ratio = float | tuple[Any, ...]  # cells per pixel, or (function of frames, ratio, ratio) for video


def from_unit_range(pixels: Tensor) -> Tensor:
    """0..1 to -1..1."""
    return pixels * 2.0 - 1.0


def to_unit_range(pixels: Tensor) -> Tensor:
    """-1..1 to 0..1, cut off outside; in place."""
    return pixels.add_(1.0).div_(2.0).clamp_(0.0, 1.0)


def unchanged(pixels: Tensor) -> Tensor:
    """For autoencoders that work on values as they are."""
    return pixels


@dataclass(frozen=True)
class AutoencoderSpec:
    """Facts about one autoencoder.

    Attributes:
        name: For messages.
        build: Makes the network, given ``dtype`` and ``device``.
        latent_channels, latent_dim: Channels of a latent and its spatial (and time) axes.
        decoded_channels: Channels that a latent to decode must have, where `latent_channels`, which
            packages read, tells another number; 0: the same.
        downscale_ratio, upscale_ratio: Pixels per latent cell.
        memory_encode, memory_decode: Bytes that a batch of a given shape takes, ``(shape, dtype)``.
        working_dtypes: Types it computes well in, best first.
        process_input, process_output: Between pictures in 0..1 and what the network takes and
            gives.
        downscale_index_formula, upscale_index_formula: Where a tile begins, when that is not the
            ratio's doing.
        not_video: Whether a batch of pictures is a batch also where the latent has a time axis.
        has_tiles: Whether latents may be cut into tiles.
        of_sound: Whether it takes sounds ``[B, samples, channels]``.
        sample_rate: Samples a second of these.
        crop_input: Whether pictures are cut to a multiple of the ratio.
        pad_channel_value: What missing channels are filled with, "replicate" for the last one there
            is; None: they may not be missing.
        to_file: From the network's weights to those of a file.
        default_weights: Values of parameters a file may lack (see `comfy.weights.fill`).
        header: What a saved file says of itself beside its weights.
    """

    name: str
    build: Callable[..., nn.Module]
    memory_encode: Callable[[Sequence[int], torch.dtype], float]
    memory_decode: Callable[[Sequence[int], torch.dtype], float]
    latent_channels: int = 4
    latent_dim: int = 2
    decoded_channels: int = 0
    output_channels: int = 3
    downscale_ratio: Ratio = 8
    upscale_ratio: Ratio = 8
    working_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    process_input: Callable[[Tensor], Tensor] = from_unit_range
    process_output: Callable[[Tensor], Tensor] = to_unit_range
    downscale_index_formula: tuple[Any, ...] | None = None
    upscale_index_formula: tuple[Any, ...] | None = None
    not_video: bool = False
    has_tiles: bool = True
    of_sound: bool = False
    sample_rate: int = 44100
    crop_input: bool = True
    pad_channel_value: float | str | None = None
    extra_1d_channel: int | None = None
    to_file: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    default_weights: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    header: dict[str, str] = field(default_factory=dict)


def causal_ratios(time: int, space: int, encoded_time: int | None = None) -> dict[str, Any]:
    """How cells of a video autoencoder lie whose first cell is of one frame, every other of `time`.

    Args:
        time: Frames of a cell.
        space: Rows and columns of pixels of a cell.
        encoded_time: Frames of a cell for the encoder, where they are others.
    """
    taken = time if encoded_time is None else encoded_time
    return {
        "downscale_ratio": (lambda frames: max(0, (frames + taken - 1) // taken), space, space),
        "upscale_ratio": (lambda frames: max(0, frames * time - (time - 1)), space, space),
        "downscale_index_formula": (taken, space, space),
        "upscale_index_formula": (time, space, space),
    }
