"""Sizes of text encoders, read from their weights, so that small ones load like full ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy.families.language_sizes import (
    llm_config,
    qwen3_vision_config,
    qwen35_config,
    shape_of,
)
from comfy.families.unet_layout import count_consecutive
from comfy.ldm.clip.vision import SIGLIP_KIND
from comfy.ldm.lightricks.connectors import ConnectorsConfig
from comfy.text_encoders.lt import CONNECTORS

CHANNELS_PER_HEAD = 64  # what every published text encoder of CLIP or BERT uses
ENCODERS = ("clip_l", "clip_g", "clip_h")
T5_ENCODERS = ("t5xxl", "umt5xxl", "umt5base", "t5base", "byt5_small", "pile_t5xl", "mt5xl")
BERT = "hydit_clip"
JINA = "jina_clip_2"
EVERYWHERE = ("umt5xxl", "umt5base", "pile_t5xl")  # each block has a table of distances
LLM_ENCODERS = (
    "qwen25_7b",
    "qwen25_3b",
    "qwen3_4b",
    "mistral3_24b",
    "llama",
    "qwen3_2b",
    "qwen3_06b",
    "qwen3vl",
    "qwen35",
    "gemma2_2b",
    "gemma3_4b",
    "gemma3_12b",
)
CONNECTOR_HEAD = 128  # channels of a head of the connectors of LTX-2, which have no gates
VISION_HEAD = 80  # channels of a head of the picture tower of Qwen 2.5 VL
SIGLIP_HEAD = 72  # channels of a head of the picture tower of Gemma 3
PATCHES = "embeddings.patch_embedding"
T5_ATTENTION = "layer.0.SelfAttention"


def text_model_configs(
    state_dict: Mapping[str, Tensor],
    hints: Mapping[str, int],
    told: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Options `<encoder>_model_config` for each text encoder in a state dict.

    Args:
        state_dict: Tensors by the keys of the text encoder module (`clip_l.transformer...`).
        hints: Header entries; `num_attention_heads` overrides one head per 64 channels.
        told: What a header of LTX-2 tells of its transformer, for the connectors of its text.

    Raises:
        BrokenModelError: An encoder is there, but the weights that decide its sizes are not.
    """
    configs = {}
    for encoder in ENCODERS:
        prefix = f"{encoder}.transformer.text_model."
        if any(key.startswith(prefix) for key in state_dict):
            configs[f"{encoder}_model_config"] = _config(state_dict, prefix, hints)
    for encoder in T5_ENCODERS:
        prefix = f"{encoder}.transformer."
        if any(key.startswith(f"{prefix}encoder.block.") for key in state_dict):
            kind = "umt5" if encoder in EVERYWHERE else "t5"
            configs[f"{encoder}_model_config"] = {
                **_t5_config(state_dict, prefix),
                "model_type": kind,
            }
    if any(key.startswith(f"{BERT}.transformer.") for key in state_dict):
        configs[f"{BERT}_model_config"] = _bert_config(
            state_dict, f"{BERT}.transformer.bert.", hints
        )
    if any(key.startswith(f"{JINA}.transformer.") for key in state_dict):
        configs[f"{JINA}_model_config"] = _jina_config(state_dict, f"{JINA}.transformer.model.")
    for encoder in LLM_ENCODERS:
        prefix = f"{encoder}.transformer.model."
        if any(key.startswith(f"{prefix}layers.") for key in state_dict):
            is_delta = f"{prefix}layers.0.linear_attn.A_log" in state_dict
            sizes_of = qwen35_config if is_delta else llm_config
            config = configs[f"{encoder}_model_config"] = sizes_of(state_dict, prefix)
            visual = f"{encoder}.transformer.visual."
            if f"{visual}patch_embed.proj.weight" in state_dict:
                is_newer = f"{visual}pos_embed.weight" in state_dict
                tower_of = qwen3_vision_config if is_newer else _vision_config
                config["vision_config"] = tower_of(state_dict, visual)
            siglip = f"{encoder}.transformer.vision_model."
            if f"{siglip}{PATCHES}.weight" in state_dict:
                config["vision_config"] = _siglip_config(state_dict, siglip)
    connectors = f"{CONNECTORS}.transformer."
    if any(key.startswith(connectors) for key in state_dict):
        configs[f"{CONNECTORS}_model_config"] = _connectors_config(
            state_dict, connectors, told or {}
        )
    return configs


def llm_dtype(state_dict: Mapping[str, Tensor] | None) -> torch.dtype | None:
    """Type in which the weights of a language model are kept: that of the file; None without."""
    ending = "model.layers.0.input_layernorm.weight"
    return next((v.dtype for key, v in (state_dict or {}).items() if key.endswith(ending)), None)


def _vision_config(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    width = state_dict[f"{prefix}patch_embed.proj.weight"].shape[0]
    return {
        "hidden_size": width,
        "intermediate_size": shape_of(state_dict, f"{prefix}blocks.0.mlp.gate_proj.weight")[0],
        "depth": count_consecutive(state_dict, f"{prefix}blocks."),
        "num_heads": max(1, width // VISION_HEAD),
        "out_hidden_size": shape_of(state_dict, f"{prefix}merger.mlp.2.weight")[0],
    }


def _siglip_config(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """The picture tower of Gemma 3."""
    width, channels, patch, _ = state_dict[f"{prefix}{PATCHES}.weight"].shape
    places, _ = shape_of(state_dict, f"{prefix}embeddings.position_embedding.weight")
    return {
        "model_type": SIGLIP_KIND,
        "hidden_size": width,
        "intermediate_size": shape_of(state_dict, f"{prefix}encoder.layers.0.mlp.fc1.weight")[0],
        "num_hidden_layers": count_consecutive(state_dict, f"{prefix}encoder.layers."),
        "num_attention_heads": max(1, width // SIGLIP_HEAD),
        "num_channels": channels,
        "image_size": int(places**0.5) * patch,
        "patch_size": patch,
        "hidden_act": "gelu_pytorch_tanh",
    }


def _connectors_config(
    state_dict: Mapping[str, Tensor], prefix: str, told: Mapping[str, Any]
) -> dict[str, Any]:
    """Sizes of the connectors of LTX-2; turns, and heads that gates do not tell, are the header's,
    or those published.
    """
    projections = f"{prefix}text_embedding_projection."
    if f"{projections}aggregate_embed.weight" in state_dict:
        return _connector_config(state_dict, prefix, "video", "aggregate_embed", told)
    video, sound = (
        _connector_config(state_dict, prefix, side, f"{side}_aggregate_embed", told)
        for side in ("video", "audio")
    )
    return {**video, "sound": ConnectorsConfig(**sound)}


def _connector_config(
    state_dict: Mapping[str, Tensor],
    prefix: str,
    side: str,
    projection: str,
    told: Mapping[str, Any],
) -> dict[str, Any]:
    """Sizes of one connector, and of the projection that it reads."""
    width, states = shape_of(state_dict, f"{prefix}text_embedding_projection.{projection}.weight")
    root = f"{prefix}{side}_embeddings_connector."
    blocks = f"{root}transformer_1d_blocks."
    gates = state_dict.get(f"{blocks}0.attn1.to_gate_logits.weight")
    usual = max(1, width // CONNECTOR_HEAD)
    heads = int(told.get("connector_num_attention_heads", usual))
    return {
        "states": states,
        "width": width,
        "heads": heads if gates is None else gates.shape[0],
        "layers": count_consecutive(state_dict, blocks),
        "registers": shape_of(state_dict, f"{root}learnable_registers")[0],
        "rope_type": told.get("rope_type", "split"),
        "is_gated": gates is not None,
    }


def t5_dtype(state_dict: Mapping[str, Tensor] | None) -> torch.dtype | None:
    """Type in which the weights of a T5 are kept: that of the file; None without a T5."""
    ending = "encoder.final_layer_norm.weight"
    return next((v.dtype for key, v in (state_dict or {}).items() if key.endswith(ending)), None)


def _t5_config(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    vocabulary, width = shape_of(state_dict, f"{prefix}shared.weight")
    block = f"{prefix}encoder.block.0."
    inner, _ = shape_of(state_dict, f"{block}{T5_ATTENTION}.q.weight")
    _, heads = shape_of(state_dict, f"{block}{T5_ATTENTION}.relative_attention_bias.weight")
    gated = f"{block}layer.1.DenseReluDense.wi_1.weight" in state_dict
    first = "wi_0" if gated else "wi"
    hidden, _ = shape_of(state_dict, f"{block}layer.1.DenseReluDense.{first}.weight")
    return {
        "d_model": width,
        "d_kv": inner // heads,
        "d_ff": hidden,
        "num_heads": heads,
        "num_layers": count_consecutive(state_dict, f"{prefix}encoder.block."),
        "vocab_size": vocabulary,
        "is_gated_act": gated,
        "dense_act_fn": "gelu_pytorch_tanh" if gated else "relu",
    }


def token_lengths(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Tokenizer data ``<encoder>_max_length``: a chunk of CLIP is as long as it has positions.

    These are 77, and 248 in Long-CLIP (https://arxiv.org/abs/2403.15378).
    """
    found = ((name, configs.get(f"{name}_model_config")) for name in ("clip_l", "clip_g"))
    return {
        f"{name}_max_length": config["max_position_embeddings"] for name, config in found if config
    }


def _config(
    state_dict: Mapping[str, Tensor], prefix: str, hints: Mapping[str, int]
) -> dict[str, Any]:
    vocabulary, width = shape_of(state_dict, f"{prefix}embeddings.token_embedding.weight")
    positions, _ = shape_of(state_dict, f"{prefix}embeddings.position_embedding.weight")
    inner, _ = shape_of(state_dict, f"{prefix}encoder.layers.0.mlp.fc1.weight")
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": count_consecutive(state_dict, f"{prefix}encoder.layers."),
        "num_attention_heads": hints.get("num_attention_heads", max(1, width // CHANNELS_PER_HEAD)),
        "max_position_embeddings": positions,
        "vocab_size": vocabulary,
    }


def _bert_config(
    state_dict: Mapping[str, Tensor], prefix: str, hints: Mapping[str, int]
) -> dict[str, Any]:
    vocabulary, width = shape_of(state_dict, f"{prefix}embeddings.word_embeddings.weight")
    positions, _ = shape_of(state_dict, f"{prefix}embeddings.position_embeddings.weight")
    inner, _ = shape_of(state_dict, f"{prefix}encoder.layer.0.intermediate.dense.weight")
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": count_consecutive(state_dict, f"{prefix}encoder.layer."),
        "num_attention_heads": hints.get("num_attention_heads", max(1, width // CHANNELS_PER_HEAD)),
        "max_position_embeddings": positions,
        "vocab_size": vocabulary,
    }


def _jina_config(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    vocabulary, width = shape_of(state_dict, f"{prefix}embeddings.word_embeddings.weight")
    kinds, _ = shape_of(state_dict, f"{prefix}embeddings.token_type_embeddings.weight")
    inner, _ = shape_of(state_dict, f"{prefix}encoder.layers.0.mlp.fc1.weight")
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": count_consecutive(state_dict, f"{prefix}encoder.layers."),
        "num_attention_heads": max(1, width // CHANNELS_PER_HEAD),
        "type_vocab_size": kinds,
        "vocab_size": vocabulary,
    }
