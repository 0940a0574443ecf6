"""CLIPs with more than 77 positions (Long-CLIP), under the names custom nodes import.

`comfy.text_loading` itself reads lengths from the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

POSITIONS = "text_model.embeddings.position_embedding.weight"
DEEP = "text_model.encoder.layers.30.mlp.fc1.weight"  # bigG has 32 layers, ViT-L 12


def model_options_long_clip(
    sd: Mapping[str, Tensor], tokenizer_data: Mapping[str, Any], model_options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tokenizer data and model options with the number of positions of the CLIP in a state dict.

    Args:
        sd: Its tensors, under ``clip_l.``, ``clip_g.`` or no name of an encoder.
    Returns:
        Copies of both; without such a CLIP nothing is added.
    """
    alone = "clip_g" if DEEP in sd else "clip_l"
    keys = {f"clip_l.{POSITIONS}": "clip_l", f"clip_g.{POSITIONS}": "clip_g", POSITIONS: alone}
    data, options = dict(tokenizer_data), dict(model_options)
    for key, name in keys.items():
        if key in sd:
            length = sd[key].shape[0]
            data[f"{name}_max_length"] = length
            own = options.get(f"{name}_model_config") or {}
            options[f"{name}_model_config"] = {**own, "max_position_embeddings": length}
            break
    return data, options
