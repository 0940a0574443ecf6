"""Sizes of CLIP text encoders, read from their weights, so that small ones load like full ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy.families.family import BrokenModelError
from comfy.families.unet_layout import count_consecutive

CHANNELS_PER_HEAD = 64  # what every published CLIP text encoder uses
ENCODERS = ("clip_l", "clip_g", "clip_h")


def text_model_configs(
    state_dict: Mapping[str, Tensor], hints: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
    """Options `<encoder>_model_config` for each CLIP text encoder in a state dict.

    Args:
        state_dict: Tensors by the keys of the text encoder module (`clip_l.transformer...`).
        hints: Header entries; `num_attention_heads` overrides one head per 64 channels.

    Raises:
        BrokenModelError: An encoder is there, but the weights that decide its sizes are not.
    """
    configs = {}
    for encoder in ENCODERS:
        prefix = f"{encoder}.transformer.text_model."
        if any(key.startswith(prefix) for key in state_dict):
            configs[f"{encoder}_model_config"] = _config(state_dict, prefix, hints)
    return configs


def _config(
    state_dict: Mapping[str, Tensor], prefix: str, hints: Mapping[str, int]
) -> dict[str, Any]:
    vocabulary, width = _shape(state_dict, f"{prefix}embeddings.token_embedding.weight")
    positions, _ = _shape(state_dict, f"{prefix}embeddings.position_embedding.weight")
    inner, _ = _shape(state_dict, f"{prefix}encoder.layers.0.mlp.fc1.weight")
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": count_consecutive(state_dict, f"{prefix}encoder.layers."),
        "num_attention_heads": hints.get("num_attention_heads", max(1, width // CHANNELS_PER_HEAD)),
        "max_position_embeddings": positions,
        "vocab_size": vocabulary,
    }


def _shape(state_dict: Mapping[str, Tensor], key: str) -> tuple[int, int]:
    if key not in state_dict:
        raise BrokenModelError(f"the text encoder lacks {key}; fetch the file again")
    rows, columns = state_dict[key].shape
    return rows, columns
