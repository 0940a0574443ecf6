"""Names of diffusion transformers' weights in the diffusers library.

A target is our name, or (our name, (axis, start, length)) where diffusers splits a packed weight,
or (our name, None, function) where the rows are stored in another order. The functions are named
as custom nodes import them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

Config = Mapping[str, Any]
Names = dict[str, Any]

BOTH = ("weight", "bias")


def swap_scale_shift(weight: torch.Tensor) -> torch.Tensor:
    """Exchange the halves of a modulation's rows: diffusers stores scale before shift."""
    first, second = weight.chunk(2, dim=0)
    return torch.cat([second, first], dim=0)


def _renamed(table: Mapping[str, str], theirs: str = "", ours: str = "") -> Names:
    """Layers with weight and bias under both names."""
    return {f"{theirs}{t}.{p}": f"{ours}{o}.{p}" for t, o in table.items() for p in BOTH}


def _weights(table: Mapping[str, str], theirs: str = "", ours: str = "") -> Names:
    """Single tensors under both names."""
    return {theirs + t: ours + o for t, o in table.items()}


def _packed(theirs: Iterable[str], ours: str, lengths: Iterable[int]) -> Names:
    """Layers that we keep in one weight, row block after row block."""
    names: Names = {}
    start = 0
    for layer, length in zip(theirs, lengths):
        for part in BOTH:
            names[f"{layer}.{part}"] = (f"{ours}.{part}", (0, start, length))
        start += length
    return names


def _attention_inputs(prefix: str, names: Iterable[str], ours: str, size: int) -> Names:
    return _packed([prefix + n for n in names], ours, [size] * 3)


def _swapped(layer: str, ours: str, parts: Iterable[str] = BOTH) -> Names:
    return {f"{layer}.{p}": (f"{ours}.{p}", None, swap_scale_shift) for p in parts}


def _prefixed(names: Names, prefix: str) -> Names:
    """The targets below a prefix."""
    if not prefix:
        return names
    return {
        theirs: prefix + ours if isinstance(ours, str) else (prefix + ours[0], *ours[1:])
        for theirs, ours in names.items()
    }


QKV, ADDED_QKV = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")

MMDIT_BLOCK = {
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "attn.to_out.0": "x_block.attn.proj",
    "attn.to_add_out": "context_block.attn.proj",
    "attn2.to_out.0": "x_block.attn2.proj",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
}
MMDIT_BLOCK_NORMS = {
    "attn.norm_q.weight": "x_block.attn.ln_q.weight",
    "attn.norm_k.weight": "x_block.attn.ln_k.weight",
    "attn2.norm_q.weight": "x_block.attn2.ln_q.weight",
    "attn2.norm_k.weight": "x_block.attn2.ln_k.weight",
    "attn.norm_added_q.weight": "context_block.attn.ln_q.weight",
    "attn.norm_added_k.weight": "context_block.attn.ln_k.weight",
}
MMDIT_BASIC = {
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "pos_embed.proj": "x_embedder.proj",
    "proj_out": "final_layer.linear",
    "context_embedder": "context_embedder",
}


def mmdit_to_diffusers(mmdit_config: Config, output_prefix: str = "") -> Names:
    """SD3 and SD3.5; the hidden size is 64 times the depth.

    Args:
        mmdit_config: The network's configuration.
        output_prefix: Put before our names.
    """
    depth = mmdit_config.get("depth", 0)
    size = 64 * depth
    names: Names = {}
    blocks = mmdit_config.get("num_blocks", depth)
    for index in range(blocks):
        theirs, ours = f"transformer_blocks.{index}.", f"joint_blocks.{index}."
        names |= _attention_inputs(f"{theirs}attn.", QKV, f"{ours}x_block.attn.qkv", size)
        names |= _attention_inputs(
            f"{theirs}attn.", ADDED_QKV, f"{ours}context_block.attn.qkv", size
        )
        names |= _attention_inputs(f"{theirs}attn2.", QKV, f"{ours}x_block.attn2.qkv", size)
        names |= _renamed(MMDIT_BLOCK, theirs, ours)
        names |= _weights(MMDIT_BLOCK_NORMS, theirs, ours)
    last = f"{blocks - 1}."  # the last block stores its context modulation scale first
    names |= _swapped(
        f"transformer_blocks.{last}norm1_context.linear",
        f"joint_blocks.{last}context_block.adaLN_modulation.1",
    )
    names |= _renamed(MMDIT_BASIC)
    names["pos_embed.pos_embed"] = "pos_embed"
    names |= _swapped("norm_out.linear", "final_layer.adaLN_modulation.1")
    return _prefixed(names, output_prefix)


FLUX_BLOCK = {
    "attn.to_out.0": "img_attn.proj",
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_add_out": "txt_attn.proj",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
FLUX_BLOCK_NORMS = {
    "attn.norm_q.weight": "img_attn.norm.query_norm.scale",
    "attn.norm_k.weight": "img_attn.norm.key_norm.scale",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
}
FLUX_SINGLE = {"norm.linear": "modulation.lin", "proj_out": "linear2"}
FLUX_SINGLE_NORMS = {
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
}
FLUX_BASIC = {
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "proj_out": "final_layer.linear",
    "controlnet_x_embedder": "pos_embed_input",
}


def flux_to_diffusers(flux_config: Config, output_prefix: str = "") -> Names:
    """FLUX.1, FLUX.2 and Chroma; arguments as in `mmdit_to_diffusers`."""
    size = flux_config.get("hidden_size", 0)
    # FLUX.2 packs this layer otherwise, and so has no name for it; on record it has one.
    ratio = 4.0 if flux_config.get("mlp_silu_act") else flux_config.get("mlp_ratio", 4.0)
    wide = int(size * ratio)
    names: Names = {}
    for index in range(flux_config.get("depth", 0)):
        theirs, ours = f"transformer_blocks.{index}.", f"double_blocks.{index}."
        names |= _attention_inputs(f"{theirs}attn.", QKV, f"{ours}img_attn.qkv", size)
        names |= _attention_inputs(f"{theirs}attn.", ADDED_QKV, f"{ours}txt_attn.qkv", size)
        names |= _renamed(FLUX_BLOCK, theirs, ours)
        names |= _weights(FLUX_BLOCK_NORMS, theirs, ours)
    for index in range(flux_config.get("depth_single_blocks", 0)):
        theirs, ours = f"single_transformer_blocks.{index}.", f"single_blocks.{index}."
        layers = [f"{theirs}attn.{n}" for n in QKV] + [f"{theirs}proj_mlp"]
        names |= _packed(layers, f"{ours}linear1", [size, size, size, wide])
        names |= _renamed(FLUX_SINGLE, theirs, ours)
        names |= _weights(FLUX_SINGLE_NORMS, theirs, ours)
    names |= _renamed(FLUX_BASIC)
    names |= _swapped("norm_out.linear", "final_layer.adaLN_modulation.1")
    return _prefixed(names, output_prefix)


AURAFLOW_DOUBLE = {
    "attn.to_q": "attn.w2q", "attn.to_k": "attn.w2k", "attn.to_v": "attn.w2v",
    "attn.to_out.0": "attn.w2o", "attn.add_q_proj": "attn.w1q", "attn.add_k_proj": "attn.w1k",
    "attn.add_v_proj": "attn.w1v", "attn.to_add_out": "attn.w1o", "ff.linear_1": "mlpX.c_fc1",
    "ff.linear_2": "mlpX.c_fc2", "ff.out_projection": "mlpX.c_proj",
    "ff_context.linear_1": "mlpC.c_fc1", "ff_context.linear_2": "mlpC.c_fc2",
    "ff_context.out_projection": "mlpC.c_proj", "norm1.linear": "modX.1",
    "norm1_context.linear": "modC.1",
}  # fmt: skip
AURAFLOW_SINGLE = {
    "attn.to_q": "attn.w1q", "attn.to_k": "attn.w1k", "attn.to_v": "attn.w1v",
    "attn.to_out.0": "attn.w1o", "norm1.linear": "modCX.1", "ff.linear_1": "mlp.c_fc1",
    "ff.linear_2": "mlp.c_fc2", "ff.out_projection": "mlp.c_proj",
}  # fmt: skip
AURAFLOW_BASIC = {
    "pos_embed.proj": "init_x_linear",
    "time_step_proj.linear_1": "t_embedder.mlp.0",
    "time_step_proj.linear_2": "t_embedder.mlp.2",
}
AURAFLOW_TENSORS = {
    "register_tokens": "register_tokens",
    "pos_embed.pos_embed": "positional_encoding",
    "proj_out.weight": "final_linear.weight",
    "context_embedder.weight": "cond_seq_linear.weight",
}


def auraflow_to_diffusers(mmdit_config: Config, output_prefix: str = "") -> Names:
    """AuraFlow; arguments as in `mmdit_to_diffusers`."""
    doubles = mmdit_config.get("n_double_layers", 0)
    names: Names = {}
    for table, theirs, ours, count in (
        (AURAFLOW_DOUBLE, "joint_transformer_blocks", "double_layers", doubles),
        (AURAFLOW_SINGLE, "single_transformer_blocks", "single_layers",
         mmdit_config.get("n_layers", 0) - doubles),
    ):  # fmt: skip
        for index in range(count):
            for layer, own in table.items():
                names[f"{theirs}.{index}.{layer}.weight"] = f"{ours}.{index}.{own}.weight"
    names |= _renamed(AURAFLOW_BASIC)
    names |= _weights(AURAFLOW_TENSORS)
    names |= _swapped("norm_out.linear", "modF.1", parts=("weight",))
    return _prefixed(names, output_prefix)


PIXART_BLOCK = {
    "attn1.to_out.0": "attn.proj",
    "attn2.to_q": "cross_attn.q_linear",
    "attn2.to_out.0": "cross_attn.proj",
    "ff.net.0.proj": "mlp.fc1",
    "ff.net.2": "mlp.fc2",
}
PIXART_BASIC = {
    "pos_embed.proj": "x_embedder.proj",
    "adaln_single.linear": "t_block.1",
    "adaln_single.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "adaln_single.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "adaln_single.emb.resolution_embedder.linear_1": "csize_embedder.mlp.0",
    "adaln_single.emb.resolution_embedder.linear_2": "csize_embedder.mlp.2",
    "adaln_single.emb.aspect_ratio_embedder.linear_1": "ar_embedder.mlp.0",
    "adaln_single.emb.aspect_ratio_embedder.linear_2": "ar_embedder.mlp.2",
    "caption_projection.linear_1": "y_embedder.y_proj.fc1",
    "caption_projection.linear_2": "y_embedder.y_proj.fc2",
    "proj_out": "final_layer.linear",
}
PIXART_TENSORS = {
    "caption_projection.y_embedding": "y_embedder.y_embedding",
    "scale_shift_table": "final_layer.scale_shift_table",
}


def pixart_to_diffusers(mmdit_config: Config, output_prefix: str = "") -> Names:
    """PixArt alpha and sigma; arguments as in `mmdit_to_diffusers`."""
    size = mmdit_config.get("hidden_size", 1152)
    names: Names = {}
    for index in range(mmdit_config.get("depth", 0)):
        theirs, ours = f"transformer_blocks.{index}.", f"blocks.{index}."
        names |= _attention_inputs(f"{theirs}attn1.", QKV, f"{ours}attn.qkv", size)
        names |= _packed(
            [f"{theirs}attn2.to_k", f"{theirs}attn2.to_v"],
            f"{ours}cross_attn.kv_linear",
            [size] * 2,
        )
        names |= _renamed(PIXART_BLOCK, theirs, ours)
        names[f"{theirs}scale_shift_table"] = f"{ours}scale_shift_table"
    names |= _renamed(PIXART_BASIC)
    names |= _weights(PIXART_TENSORS)
    return _prefixed(names, output_prefix)


LUMINA_BLOCK_TENSORS = {
    "attention.norm_q.weight": "attention.q_norm.weight",
    "attention.norm_k.weight": "attention.k_norm.weight",
    **{
        f"{name}.weight": f"{name}.weight"
        for name in (
            "attention_norm1", "attention_norm2", "feed_forward.w1", "feed_forward.w2",
            "feed_forward.w3", "ffn_norm1", "ffn_norm2",
        )
    },
}  # fmt: skip
LUMINA_BLOCK = {
    "attention.to_out.0": "attention.out",
    "adaLN_modulation.0": "adaLN_modulation.0",
}
LUMINA_BASIC = {
    "all_final_layer.2-1.linear": "final_layer.linear",
    "all_final_layer.2-1.adaLN_modulation.1": "final_layer.adaLN_modulation.1",
    "all_x_embedder.2-1": "x_embedder",
    "cap_embedder.1": "cap_embedder.1",
    "t_embedder.mlp.0": "t_embedder.mlp.0",
    "t_embedder.mlp.2": "t_embedder.mlp.2",
}
LUMINA_TENSORS = {
    "x_pad_token": "x_pad_token",
    "cap_pad_token": "cap_pad_token",
    "cap_embedder.0.weight": "cap_embedder.0.weight",
}


def z_image_to_diffusers(mmdit_config: Config, output_prefix: str = "") -> Names:
    """Z-Image and Lumina 2; arguments as in `mmdit_to_diffusers`."""
    size = mmdit_config.get("dim", 0)
    refiners = mmdit_config.get("n_refiner_layers", 2)
    names: Names = {}
    for group, count in (
        ("layers", mmdit_config.get("n_layers", 0)),
        ("context_refiner", refiners),
        ("noise_refiner", refiners),
    ):
        for index in range(count):
            block = f"{group}.{index}."
            names |= _attention_inputs(f"{block}attention.", QKV, f"{block}attention.qkv", size)
            names |= _renamed(LUMINA_BLOCK, block, block)
            names |= _weights(LUMINA_BLOCK_TENSORS, block, block)
    names |= _renamed(LUMINA_BASIC)
    names |= _weights(LUMINA_TENSORS)
    return _prefixed(names, output_prefix)
