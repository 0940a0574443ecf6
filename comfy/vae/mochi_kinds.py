"""Recognises the autoencoder of Mochi, whole or one half of it; see `kinds`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from comfy.ldm.genmo.vae import FRAMES, PIXELS, Decoder, Encoder, MochiVAEConfig, VideoVAE
from comfy.vae.spec import AutoencoderSpec, causal_ratios
from comfy.vae.video_kinds import COPIES, video_memory
from comfy.weights.state_dict import count_parts

StateDict = Mapping[str, Tensor]
Metadata = Mapping[str, str] | None
ENCODER_MARK = "layers.4.layers.1.attn_block.attn.qkv.weight"
DECODER_MARK = "blocks.2.blocks.0.stack.5.weight"
STAGES = 3
# Values of the widest layer at full size that live at once: 5 and 4.4 were measured.
ENCODER_COPIES, DECODER_COPIES = 6, 5.25


def detect_mochi(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:
    """The autoencoder of Mochi, or its encoder or decoder alone, whose keys have no prefix."""
    del metadata
    build: Callable[..., Any]
    if f"decoder.{DECODER_MARK}" in weights:
        sizes = {**_encoder(weights, "encoder."), **_decoder(weights, "decoder.")}
        build = VideoVAE
    elif DECODER_MARK in weights:
        sizes, build = _decoder(weights, ""), Decoder
    elif ENCODER_MARK in weights:
        sizes, build = _encoder(weights, ""), Encoder
    else:
        return None
    config = MochiVAEConfig(**sizes)
    widths = {"encode": config.encoder[0] * ENCODER_COPIES, "decode": config.decoder[0]}
    widths["decode"] = round(widths["decode"] * DECODER_COPIES)
    encode, decode = (
        functools.partial(video_memory, width=-(-width // COPIES)) for width in widths.values()
    )
    return AutoencoderSpec(
        name="Mochi",
        build=functools.partial(build, config),
        memory_encode=functools.partial(encode, cell=1, time=1),
        memory_decode=functools.partial(decode, cell=PIXELS, time=FRAMES),
        latent_channels=config.z_channels,
        latent_dim=3,
        **causal_ratios(FRAMES, PIXELS),
        working_dtypes=(torch.float16, torch.float32),
    )


def _encoder(weights: StateDict, root: str) -> dict[str, Any]:
    """Sizes of the encoder: layers of one width, three stages, layers of the last width."""
    total = count_parts(weights, f"{root}layers.")
    stages = [n for n in range(total) if f"{root}layers.{n}.layers.0.weight" in weights]
    first = next(iter(stages), total)
    inner = [count_parts(weights, f"{root}layers.{n}.layers.") - 1 for n in stages]
    widths = [weights[f"{root}layers.{n}.layers.0.weight"].shape[0] for n in stages]
    return {
        "encoder": (weights[f"{root}layers.0.weight"].shape[0], *widths),
        "encoder_blocks": (first - 1, *inner, total - first - len(stages)),
        "z_channels": weights[f"{root}output_proj.weight"].shape[0] // 2,
    }


def _decoder(weights: StateDict, root: str) -> dict[str, Any]:
    """Sizes of the decoder: its stages stand in the file from coarse to fine."""
    last = STAGES + 1
    stages = range(STAGES, 0, -1)
    widths = [weights[f"{root}blocks.{n}.blocks.0.stack.0.weight"].shape[0] for n in stages]
    inner = [count_parts(weights, f"{root}blocks.{n}.blocks.") for n in stages]
    return {
        "decoder": (weights[f"{root}output_proj.weight"].shape[1], *widths),
        "decoder_blocks": (
            count_parts(weights, f"{root}blocks.{last}."),
            *inner,
            count_parts(weights, f"{root}blocks.0.") - 1,
        ),
        "z_channels": weights[f"{root}blocks.0.0.weight"].shape[1],
    }
