"""Recognises the autoencoders of HunyuanImage 2.1 and HunyuanVideo 1.5; see `kinds`."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor

from comfy.ldm.hunyuan_video.packed_vae import PLANE, PackedConfig, PackedVAE
from comfy.vae.spec import AutoencoderSpec, causal_ratios
from comfy.vae.video_kinds import video_memory
from comfy.weights.header_hints import read_hints
from comfy.weights.state_dict import count_parts

StateDict = Mapping[str, Tensor]
Metadata = Mapping[str, str] | None
# Levels of these decoders count from the coarsest, so that the first is made larger.
PICTURE_MARK = "decoder.up.0.upsample.conv.weight"
VIDEO_MARK = "decoder.up.0.upsample.conv.conv.weight"
USUAL_NORM_GROUPS = 32
WORKING_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def _widths(weights: StateDict, inner: str) -> list[int]:
    levels = range(count_parts(weights, "decoder.up."))
    return [weights[f"decoder.up.{n}.block.0.conv1.{inner}weight"].shape[0] for n in levels][::-1]


def detect_hunyuan_image(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:
    """That of HunyuanImage 2.1."""
    if PICTURE_MARK not in weights or weights[PICTURE_MARK].ndim != 4:
        return None
    groups = read_hints(metadata, "vae_config").get("norm_num_groups", USUAL_NORM_GROUPS)
    widths = _widths(weights, "")
    config = PackedConfig(
        widths=tuple(widths),
        blocks=count_parts(weights, "decoder.up.0.block.") - 1,
        z_channels=weights["decoder.conv_in.weight"].shape[1],
        norm_num_groups=groups,
    )
    ratio = 2 ** (len(widths) - 1)
    memory = functools.partial(_picture_memory, width=widths[0])
    return AutoencoderSpec(
        name="HunyuanImage 2.1",
        build=functools.partial(PackedVAE, config),
        memory_encode=functools.partial(memory, cell=1),
        memory_decode=functools.partial(memory, cell=ratio),
        latent_channels=config.z_channels,
        downscale_ratio=ratio,
        upscale_ratio=ratio,
        working_dtypes=WORKING_DTYPES,
    )


def _picture_memory(shape: torch.Size, dtype: torch.dtype, width: int, cell: int) -> float:
    return video_memory((*shape[:2], 1, *shape[2:]), dtype, width, cell, 1)


def detect_hunyuan_video15(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:
    """That of HunyuanVideo 1.5 and of the refiner of HunyuanImage 2.1."""
    del metadata
    if VIDEO_MARK not in weights:
        return None
    widths = _widths(weights, "conv.")
    packs = [
        weights[f"decoder.up.{n}.upsample.conv.conv.weight"].shape[0]
        for n in range(len(widths) - 1)
    ][::-1]
    config = PackedConfig(
        widths=tuple(widths),
        blocks=count_parts(weights, "decoder.up.0.block.") - 1,
        z_channels=weights["decoder.conv_in.conv.weight"].shape[1],
        halves_time=tuple(made > PLANE * width for made, width in zip(packs, widths)),
    )
    space, time = 2 ** (len(widths) - 1), 2 ** sum(config.halves_time or ())
    memory = functools.partial(video_memory, width=widths[0])
    return AutoencoderSpec(
        name="HunyuanVideo 1.5",
        build=functools.partial(PackedVAE, config),
        memory_encode=functools.partial(memory, cell=1, time=1),
        memory_decode=functools.partial(memory, cell=space, time=time),
        latent_channels=config.z_channels,
        latent_dim=3,
        **causal_ratios(time, space),
        working_dtypes=WORKING_DTYPES,
    )
