"""Recognises the autoencoders of Stable Cascade by the keys and shapes of their weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from comfy.ldm.cascade.stage_a import PATCH, StageA
from comfy.ldm.cascade.stage_c_coder import StageC_coder
from comfy.vae.spec import AutoencoderSpec, unchanged
from comfy.weights.state_dict import count_parts

STAGE_A_MARK = "vquantizer.codebook.weight"
ENCODER_MARK = "backbone.1.0.block.0.1.num_batches_tracked"
PREVIEWER_MARK = "blocks.11.num_batches_tracked"
LATENT_CHANNELS = 16  # of stage C
ENCODER_RATIO, PREVIEWER_RATIO = 32, 4
PIXEL_BYTES = 2000  # values that live at once for a pixel of a full-size network
Weights = Mapping[str, Tensor]
COUNTERS: dict[str, Callable[[Tensor], Tensor]] = {"num_batches_tracked": torch.zeros_like}


def _memory(shape: Sequence[int], dtype: torch.dtype, cell: int = 1) -> float:
    """Bytes for pictures ``[B, C, H, W]`` of pixels or of cells."""
    return float(PIXEL_BYTES * shape[2] * shape[3] * cell**2 * dtype.itemsize)


def detect_stage_a(weights: Weights, metadata: Mapping[str, str] | None) -> AutoencoderSpec | None:
    """That between pictures and latents of stage B."""
    del metadata
    if STAGE_A_MARK not in weights:
        return None
    codes, channels = weights[STAGE_A_MARK].shape
    levels = count_parts(weights, "down_blocks.") // 2
    width = weights["up_blocks.0.0.weight"].shape[0]
    blocks = count_parts(weights, "up_blocks.") - 1 - 2 * (levels - 1)
    ratio = PATCH * 2 ** (levels - 1)
    return AutoencoderSpec(
        name="Stable Cascade, stage A",
        build=functools.partial(StageA, levels, blocks, width, channels, codes),
        memory_encode=_memory,
        memory_decode=functools.partial(_memory, cell=ratio),
        latent_channels=channels,
        downscale_ratio=ratio,
        upscale_ratio=ratio,
        process_input=unchanged,
        process_output=unchanged,
        default_weights=COUNTERS,
    )


def detect_stage_c(weights: Weights, metadata: Mapping[str, str] | None) -> AutoencoderSpec | None:
    """The encoder of stage C, the decoder that shows its latents, or both."""
    del metadata
    has_encoder = f"encoder.{ENCODER_MARK}" in weights
    has_previewer = f"previewer.{PREVIEWER_MARK}" in weights
    if not has_encoder and not has_previewer:
        return None
    hidden = weights["previewer.blocks.0.weight"].shape[0] if has_previewer else 0
    build = functools.partial(StageC_coder, LATENT_CHANNELS, hidden, has_encoder, has_previewer)
    return AutoencoderSpec(
        name="Stable Cascade, stage C",
        build=build,
        memory_encode=_memory,
        memory_decode=functools.partial(_memory, cell=PREVIEWER_RATIO),
        latent_channels=LATENT_CHANNELS,
        downscale_ratio=ENCODER_RATIO,
        upscale_ratio=PREVIEWER_RATIO,
        default_weights=COUNTERS,
    )


def in_place_of_both(weights: Weights) -> dict[str, Tensor]:
    """Weights of a file of one half of stage C's, under the keys of a file of both."""
    halves = ((ENCODER_MARK, "encoder."), (PREVIEWER_MARK, "previewer."))
    half = next((prefix for mark, prefix in halves if mark in weights), None)
    return dict(weights) if half is None else {half + key: v for key, v in weights.items()}
