"""Sizes of language models and of the picture towers of Qwen 3 VL and 3.5, read from weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy.families.family import BrokenModelError
from comfy.families.unet_layout import count_consecutive
from comfy.ldm.llm.delta import DeltaSizes

LLM_HEAD = 128  # channels of a head where no norm tells
GEMMA_HEAD = 256  # likewise
DELTA_KEY_HEAD = 128  # channels of a head of keys in Qwen 3.5, which no weight tells
DEEP = "deepstack_merger_list."  # what the picture tower of Qwen 3 VL has, that of Qwen 3.5 not
DEEP_LAYERS = {24: (5, 11, 17), 27: (8, 16, 24)}  # that it reads, by how many there are
TOWER_HEAD, MOST_TOWER_HEADS = 64, 16  # channels of a head; wider towers have wider heads


def llm_config(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """Sizes of a language model all of whose layers attend alike."""
    vocabulary, width = shape_of(state_dict, f"{prefix}embed_tokens.weight")
    layer = f"{prefix}layers.0."
    norm = state_dict.get(f"{layer}self_attn.q_norm.weight")
    is_gemma = f"{layer}pre_feedforward_layernorm.weight" in state_dict
    usual = GEMMA_HEAD if is_gemma else LLM_HEAD
    head = usual if norm is None else norm.shape[0]
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shape_of(state_dict, f"{layer}mlp.gate_proj.weight")[0],
        "num_hidden_layers": count_consecutive(state_dict, f"{prefix}layers."),
        "num_attention_heads": shape_of(state_dict, f"{layer}self_attn.q_proj.weight")[0] // head,
        "num_key_value_heads": shape_of(state_dict, f"{layer}self_attn.k_proj.weight")[0] // head,
        "head_dim": head,
        "final_norm": f"{prefix}norm.weight" in state_dict,
        "lm_head": f"{prefix.removesuffix('model.')}lm_head.weight" in state_dict,
    }


def qwen35_config(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """Sizes of Qwen 3.5, whose layers attend in two ways.

    Raises:
        BrokenModelError: No layer attends to all tokens, or weights are missing.
    """
    count = count_consecutive(state_dict, f"{prefix}layers.")
    norms = (state_dict.get(f"{prefix}layers.{n}.self_attn.q_norm.weight") for n in range(count))
    whole = [number for number, norm in enumerate(norms) if norm is not None]
    if not whole:
        raise BrokenModelError(
            f"none of the {count} layers of Qwen 3.5 sees all tokens ({prefix}layers.3.self_attn); "
            "fetch the file again"
        )
    layer, delta = f"{prefix}layers.{whole[0]}.self_attn.", f"{prefix}layers.0.linear_attn."
    head = state_dict[f"{layer}q_norm.weight"].shape[0]
    vocabulary, width = shape_of(state_dict, f"{prefix}embed_tokens.weight")
    values = shape_of(state_dict, f"{delta}out_proj.weight")[1]
    heads = state_dict[f"{delta}A_log"].shape[0]
    keys = (shape_of(state_dict, f"{delta}in_proj_qkv.weight")[0] - values) // 2
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": shape_of(state_dict, f"{prefix}layers.0.mlp.gate_proj.weight")[0],
        "num_hidden_layers": count,
        "num_attention_heads": shape_of(state_dict, f"{layer}q_proj.weight")[0] // (2 * head),
        "num_key_value_heads": shape_of(state_dict, f"{layer}k_proj.weight")[0] // head,
        "head_dim": head,
        "delta": DeltaSizes(
            key_heads=keys // DELTA_KEY_HEAD,
            value_heads=heads,
            key_width=DELTA_KEY_HEAD,
            value_width=values // heads,
            kernel=state_dict[f"{delta}conv1d.weight"].shape[-1],
        ),
        "delta_layers": tuple(number for number in range(count) if number not in whole),
        "final_norm": f"{prefix}norm.weight" in state_dict,
        "lm_head": f"{prefix.removesuffix('model.')}lm_head.weight" in state_dict,
    }


def qwen3_vision_config(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """Sizes of the picture tower of Qwen 3 VL or 3.5.

    Raises:
        BrokenModelError: It has another number of layers than those that are known, by which it is
            told which are read, or weights are missing.
    """
    width, channels, frames, patch, _ = state_dict[f"{prefix}patch_embed.proj.weight"].shape
    depth = count_consecutive(state_dict, f"{prefix}blocks.")
    is_deep = f"{prefix}{DEEP}0.norm.weight" in state_dict
    if is_deep and depth not in DEEP_LAYERS:
        known = " and ".join(map(str, DEEP_LAYERS))
        raise BrokenModelError(
            f"the picture tower of Qwen 3 VL ({prefix}blocks) has {depth} layers; towers with "
            f"{known} are known; fetch the file again"
        )
    return {
        "hidden_size": width,
        "intermediate_size": shape_of(state_dict, f"{prefix}blocks.0.mlp.linear_fc1.weight")[0],
        "depth": depth,
        "num_heads": max(1, min(MOST_TOWER_HEADS, width // TOWER_HEAD)),
        "out_hidden_size": shape_of(state_dict, f"{prefix}merger.linear_fc2.weight")[0],
        "in_channels": channels,
        "patch_size": patch,
        "temporal_patch_size": frames,
        "num_position_embeddings": shape_of(state_dict, f"{prefix}pos_embed.weight")[0],
        "deepstack_visual_indexes": DEEP_LAYERS[depth] if is_deep else (),
    }


def shape_of(state_dict: Mapping[str, Tensor], key: str) -> tuple[int, int]:
    """Rows and columns of a matrix.

    Raises:
        BrokenModelError: It is not there.
    """
    if key not in state_dict:
        raise BrokenModelError(f"the text encoder lacks {key}; fetch the file again")
    rows, columns = state_dict[key].shape
    return rows, columns
