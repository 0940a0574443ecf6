"""Names of a UNet's weights in the diffusers library, for files that use them.

The map is computed from the network's configuration: how many residual blocks and transformers each
level has. The tables are public; custom nodes extend them in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

UNET_MAP_ATTENTIONS = {
    f"{layer}.{part}" for layer in ("proj_in", "proj_out", "norm") for part in ("weight", "bias")
}
"""Weights of a spatial transformer beside its blocks; named alike on both sides."""

TRANSFORMER_BLOCKS = {
    "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "norm3.weight", "norm3.bias",
    "attn1.to_q.weight", "attn1.to_k.weight", "attn1.to_v.weight", "attn1.to_out.0.weight",
    "attn1.to_out.0.bias", "attn2.to_q.weight", "attn2.to_k.weight", "attn2.to_v.weight",
    "attn2.to_out.0.weight", "attn2.to_out.0.bias", "ff.net.0.proj.weight", "ff.net.0.proj.bias",
    "ff.net.2.weight", "ff.net.2.bias",
}  # fmt: skip
"""Weights of one transformer block; named alike on both sides."""

UNET_MAP_RESNET = {
    f"{ours}.{part}": f"{theirs}.{part}"
    for ours, theirs in (
        ("in_layers.2", "conv1"),
        ("emb_layers.1", "time_emb_proj"),
        ("out_layers.3", "conv2"),
        ("skip_connection", "conv_shortcut"),
        ("in_layers.0", "norm1"),
        ("out_layers.0", "norm2"),
    )
    for part in ("weight", "bias")
}
"""Weights of a residual block: ours -> diffusers."""

UNET_MAP_BASIC = {
    (f"{ours}.{part}", f"{theirs}.{part}")
    for ours, theirs in (
        ("label_emb.0.0", "class_embedding.linear_1"),
        ("label_emb.0.2", "class_embedding.linear_2"),
        ("label_emb.0.0", "add_embedding.linear_1"),
        ("label_emb.0.2", "add_embedding.linear_2"),
        ("input_blocks.0.0", "conv_in"),
        ("out.0", "conv_norm_out"),
        ("out.2", "conv_out"),
        ("time_embed.0", "time_embedding.linear_1"),
        ("time_embed.2", "time_embedding.linear_2"),
    )
    for part in ("weight", "bias")
}
"""Weights outside the levels: (ours, diffusers)."""

NameMap = dict[str, str]


def unet_to_diffusers(unet_config: Mapping[str, Any]) -> NameMap:
    """diffusers name -> our name of every UNet weight.

    Args:
        unet_config: The network's configuration; one without `num_res_blocks` gives an empty map.
    """
    if "num_res_blocks" not in unet_config:
        return {}
    res_blocks = list(unet_config["num_res_blocks"])
    names: NameMap = {}
    names.update(_down(res_blocks, iter(unet_config["transformer_depth"])))
    names.update(_middle(unet_config.get("transformer_depth_middle", 0)))
    depths = iter(reversed(unet_config["transformer_depth_output"]))
    names.update(_up(res_blocks, depths))
    names.update({theirs: ours for ours, theirs in UNET_MAP_BASIC})
    return names


def _resnet(theirs: str, ours: str) -> NameMap:
    return {f"{theirs}.{d}": f"{ours}.{o}" for o, d in UNET_MAP_RESNET.items()}


def _transformer(theirs: str, ours: str, depth: int) -> NameMap:
    names = {f"{theirs}.{part}": f"{ours}.{part}" for part in UNET_MAP_ATTENTIONS}
    for index in range(depth):
        block = f"transformer_blocks.{index}"
        names |= {f"{theirs}.{block}.{p}": f"{ours}.{block}.{p}" for p in TRANSFORMER_BLOCKS}
    return names


def _down(res_blocks: Sequence[int], depths: Iterator[int]) -> NameMap:
    names: NameMap = {}
    for level, count in enumerate(res_blocks):
        block = 1 + (count + 1) * level
        for index in range(count):
            names |= _resnet(f"down_blocks.{level}.resnets.{index}", f"input_blocks.{block}.0")
            depth = next(depths, 0)
            if depth > 0:
                names |= _transformer(
                    f"down_blocks.{level}.attentions.{index}", f"input_blocks.{block}.1", depth
                )
            block += 1
        for part in ("weight", "bias"):
            sampler = f"down_blocks.{level}.downsamplers.0.conv.{part}"
            names[sampler] = f"input_blocks.{block}.0.op.{part}"
    return names


def _middle(depth: int) -> NameMap:
    names = _transformer("mid_block.attentions.0", "middle_block.1", max(depth, 0))
    for index in (0, 1):
        names |= _resnet(f"mid_block.resnets.{index}", f"middle_block.{2 * index}")
    return names


def _up(res_blocks: Sequence[int], depths: Iterator[int]) -> NameMap:
    names: NameMap = {}
    for level, count in enumerate(reversed(res_blocks)):
        block = (count + 1) * level
        for index in range(count + 1):
            names |= _resnet(f"up_blocks.{level}.resnets.{index}", f"output_blocks.{block}.0")
            place = 1
            depth = next(depths, 0)
            if depth > 0:
                names |= _transformer(
                    f"up_blocks.{level}.attentions.{index}", f"output_blocks.{block}.1", depth
                )
                place = 2
            if index == count:
                for part in ("weight", "bias"):
                    sampler = f"up_blocks.{level}.upsamplers.0.conv.{part}"
                    names[sampler] = f"output_blocks.{block}.{place}.conv.{part}"
            block += 1
    return names
