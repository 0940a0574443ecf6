"""Recognises video autoencoders that share the layout of the KL autoencoder; see `kinds`."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from comfy.ldm.autoencoder.layers import AutoencoderConfig
from comfy.ldm.cosmos.vae import CausalContinuousVideoTokenizer, CosmosVAEConfig
from comfy.ldm.hunyuan_video.vae import HALVINGS_OF_TIME, HunyuanVideoVAE
from comfy.ldm.lightricks.vae.causal_video_autoencoder import (
    PATCH,
    BlockSizes,
    LTXVConfig,
    LTXVideoVAE,
)
from comfy.vae.spec import AutoencoderSpec, causal_ratios
from comfy.weights.header_hints import read_hints
from comfy.weights.ltx_header import told_of
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
        **causal_ratios(time, space),
        working_dtypes=(torch.bfloat16, torch.float16, torch.float32),
    )


def video_memory(
    shape: Sequence[int], dtype: torch.dtype, width: int, cell: int, time: int
) -> float:
    """Bytes for a video ``[B, C, T, H, W]`` of pixels or of cells, all frames at once."""
    pixels = shape[0] * shape[2] * time * shape[3] * shape[4] * cell**2
    return float(pixels * width * COPIES * dtype.itemsize)


# The mark of the published file, which is no weight, and a weight that no other kind has.
COSMOS_MARKS = ("decoder.unpatcher3d.wavelets", "decoder.conv_in.0.conv3d.weight")
COSMOS_HALVINGS = 2  # by wavelets, which have no weights
COSMOS_COPIES = 5  # of the widest layer's values that live at once, measured


def detect_cosmos(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:
    """The autoencoder of Cosmos 1."""
    del metadata
    if not any(mark in weights for mark in COSMOS_MARKS):
        return None

    def widths(half: str, entrance: str, levels: str) -> tuple[int, ...]:
        keys = [
            f"{half}.{levels}.{n}.block.0.conv1.0.conv3d.weight"
            for n in range(count_parts(weights, f"{half}.{levels}."))
        ]
        return tuple(weights[key].shape[0] for key in [f"{half}.{entrance}", *keys])

    levels = range(count_parts(weights, "encoder.down."))
    halved = [n for n in levels if f"encoder.down.{n}.downsample.conv3.conv3d.weight" in weights]
    config = CosmosVAEConfig(
        encoder=widths("encoder", "conv_in.0.conv3d.weight", "down"),
        decoder=widths("decoder", "conv_in.0.conv3d.weight", "up"),
        blocks=count_parts(weights, "encoder.down.0.block."),
        halved=len(halved),
        halvings=COSMOS_HALVINGS,
        z_channels=weights["post_quant_conv.conv3d.weight"].shape[0],
        image_channels=weights["decoder.conv_out.0.conv3d.weight"].shape[0] // 8**COSMOS_HALVINGS,
    )
    cell = config.ratio
    widest = max(config.encoder) / 8**COSMOS_HALVINGS  # of a pixel
    memory = functools.partial(video_memory, width=math.ceil(widest * COSMOS_COPIES / COPIES))
    return AutoencoderSpec(
        name="Cosmos 1",
        build=functools.partial(CausalContinuousVideoTokenizer, config),
        memory_encode=functools.partial(memory, cell=1, time=1),
        memory_decode=functools.partial(memory, cell=cell, time=cell),
        latent_channels=config.z_channels,
        latent_dim=3,
        output_channels=config.image_channels,
        **causal_ratios(cell, cell),
        working_dtypes=(torch.bfloat16, torch.float32),
    )


LTXV_MARK = "decoder.up_blocks.0.res_blocks.0.conv1.conv.weight"
LTXV_FRAMES, LTXV_PIXELS = 8, 32  # of a cell
# How many cells go into one, for a factor of channels: along height and width, time, or all.
ALL_AXES = (2, 2, 2)
STRIDES = {4: (1, 2, 2), 2: (2, 1, 1), 8: ALL_AXES}


def detect_ltxv(weights: StateDict, metadata: Metadata) -> AutoencoderSpec | None:
    """The autoencoder of LTX video, in all versions; its blocks are told by their keys, borders of
    its convolutions and what blocks of the decoder keep by the header.
    """
    if LTXV_MARK not in weights or "encoder.conv_out.conv.weight" not in weights:
        return None
    z_channels = weights["decoder.conv_in.conv.weight"].shape[1]
    encoder = _ltxv_blocks(weights, "encoder.down_blocks.", packs=True)
    has_time = "decoder.last_scale_shift_table" in weights
    told = told_of(metadata, "vae")
    decoder = _ltxv_blocks(weights, "decoder.up_blocks.", packs=False)
    is_later = any(one.kind == "unpack" and one.strides != ALL_AXES for one in decoder)  # LTX-2.3
    packs = any(one.kind == "pack" for one in encoder)
    is_second = packs and not has_time and not is_later  # LTX-2
    border = told.get("spatial_padding_mode")
    config = LTXVConfig(
        encoder,
        _with_kept(decoder, told.get("decoder_blocks"), is_later),
        z_channels,
        has_time,
        told.get("causal_decoder") is True,
        told.get("encoder_spatial_padding_mode") or border or "zeros",
        told.get("decoder_spatial_padding_mode") or border or ("reflect" if is_second else "zeros"),
    )
    space, time = LTXV_PIXELS, LTXV_FRAMES
    width = max(1, config.decoder[-1].width // PATCH**2)
    memory = functools.partial(video_memory, width=width)
    return AutoencoderSpec(
        name="LTX video",
        build=functools.partial(LTXVideoVAE, config),
        memory_encode=functools.partial(memory, cell=1, time=1),
        memory_decode=functools.partial(memory, cell=space, time=time),
        latent_channels=z_channels,
        latent_dim=3,
        **causal_ratios(time, space),
        working_dtypes=(torch.bfloat16, torch.float32),
    )


def _with_kept(
    decoder: tuple[BlockSizes, ...], listed: Any, is_later: bool
) -> tuple[BlockSizes, ...]:
    """The decoder's blocks, and of those that unpack whether they keep what they are given: as the
    header lists them, the last block first, or else as the published ones do.
    """
    entries: list[Any] = [None] * len(decoder)
    if isinstance(listed, list) and len(listed) == len(decoder):
        entries = listed[::-1]
    return tuple(
        replace(block, keeps=_keeps(block, entry, is_later))
        for block, entry in zip(decoder, entries)
    )


def _keeps(block: BlockSizes, entry: Any, is_later: bool) -> bool:
    """Whether a block keeps what it unpacks; `entry` is ``[name, settings]``."""
    if block.kind != "unpack":
        return False
    if isinstance(entry, list) and len(entry) > 1 and isinstance(entry[1], dict):
        return entry[1].get("residual") is True
    return block.reduction > 1 and not is_later


def _ltxv_blocks(weights: StateDict, root: str, packs: bool) -> tuple[BlockSizes, ...]:
    """The blocks of one half; `packs` says whether they make channels of cells."""
    roots = [f"{root}{number}." for number in range(count_parts(weights, root))]
    widths = [_ltxv_width(weights, one) for one in roots]
    return tuple(
        _ltxv_block(weights, one, width, widths[n + 1 : n + 2], packs)
        for n, (one, width) in enumerate(zip(roots, widths))
    )


def _ltxv_width(weights: StateDict, root: str) -> int:
    """Channels that a block takes."""
    names = ("res_blocks.0.conv1.conv", "conv1.conv", "conv.conv", "conv")
    found = next((name for name in names if f"{root}{name}.weight" in weights), names[0])
    return weights[f"{root}{found}.weight"].shape[1]


def _ltxv_block(
    weights: StateDict, root: str, width: int, following: list[int], packs: bool
) -> BlockSizes:
    if f"{root}res_blocks.0.conv1.conv.weight" in weights:
        return BlockSizes(
            "res", width, width, count_parts(weights, f"{root}res_blocks."),
            has_time=f"{root}res_blocks.0.scale_shift_table" in weights,
            has_noise=f"{root}res_blocks.0.per_channel_scale1" in weights,
        )  # fmt: skip
    if f"{root}conv1.conv.weight" in weights:
        return BlockSizes("widen", width, weights[f"{root}conv1.conv.weight"].shape[0])
    if f"{root}conv.weight" in weights:
        return BlockSizes("stride", width, width, strides=(2, 2, 2))
    made = weights[f"{root}conv.conv.weight"].shape[0]
    if packs:
        out = following[0]
        return BlockSizes("pack", width, out, strides=STRIDES[out // made])
    out = following[0]
    strides = STRIDES[made // out]
    return BlockSizes("unpack", width, out, strides=strides, reduction=width // out)
