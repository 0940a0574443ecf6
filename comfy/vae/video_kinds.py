"""Recognises video autoencoders that share the layout of the KL autoencoder; see `kinds`."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from comfy.ldm.autoencoder.layers import AutoencoderConfig
from comfy.ldm.hunyuan_video.vae import HALVINGS_OF_TIME, HunyuanVideoVAE
from comfy.vae.spec import AutoencoderSpec
from comfy.weights.header_hints import read_hints
from comfy.weights.state_dict import count_parts

StateDict = Mapping[str, Tensor]
Metadata = Mapping[str, str] | None
USUAL_NORM_GROUPS = 32
COPIES = 4  # of the widest layer's values at full size that live at once


def detect_hunyuan_video(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:
    """The causal autoencoder of HunyuanVideo; that of 1.5 has no convolutions around its latent."""
    first = "decoder.conv_in.conv.weight"
    if first not in weights or "post_quant_conv.weight" not in weights:
        return None
    ch = weights["decoder.norm_out.weight"].shape[0]
    levels = count_parts(weights, "decoder.up.")
    widths = [weights[f"decoder.up.{n}.block.0.conv1.conv.weight"].shape[0] for n in range(levels)]
    config = AutoencoderConfig(
        ch=ch,
        ch_mult=tuple(width // ch for width in widths),
        num_res_blocks=count_parts(weights, "decoder.up.0.block.") - 1,
        z_channels=weights[first].shape[1],
        out_ch=weights["decoder.conv_out.conv.weight"].shape[0],
        norm_num_groups=read_hints(metadata, "vae_config").get(
            "norm_num_groups", USUAL_NORM_GROUPS
        ),
    )
    space, time = config.downscale_ratio, 2**HALVINGS_OF_TIME
    widest = widths[1] if levels > 1 else ch
    memory = functools.partial(video_memory, width=widest)
    return AutoencoderSpec(
        name="HunyuanVideo",
        build=functools.partial(HunyuanVideoVAE, config),
        memory_encode=functools.partial(memory, cell=1, time=1),
        memory_decode=functools.partial(memory, cell=space, time=time),
        latent_channels=config.z_channels,
        latent_dim=3,
        output_channels=config.out_ch,
        downscale_ratio=(lambda frames: max(0, (frames + time - 1) // time), space, space),
        upscale_ratio=(lambda frames: max(0, frames * time - (time - 1)), space, space),
        downscale_index_formula=(time, space, space),
        upscale_index_formula=(time, space, space),
        working_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    )


def video_memory(
    shape: Sequence[int], dtype: torch.dtype, width: int, cell: int, time: int
) -> float:
    """Bytes for a video ``[B, C, T, H, W]`` of pixels or of cells, all frames at once."""
    pixels = shape[0] * shape[2] * time * shape[3] * shape[4] * cell**2
    return float(pixels * width * COPIES * dtype.itemsize)
