"""Diffusion transformers under the names of the diffusers library, and back under ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy.weights.diffusers_transformers import (
    auraflow_to_diffusers,
    flux_to_diffusers,
    mmdit_to_diffusers,
)
from comfy.weights.state_dict import count_parts

HEAD = 64  # channels of a head in every Stable Diffusion 3 network
FLUX_MARK = "transformer_blocks.0.attn.norm_added_k.weight"
MMDIT_MARK = "transformer_blocks.0.attn.add_q_proj.weight"
AURAFLOW_MARK = "joint_transformer_blocks.0.attn.add_k_proj.weight"


def convert_diffusers_mmdit(
    state_dict: Mapping[str, Tensor], output_prefix: str = ""
) -> dict[str, Tensor] | None:
    """FLUX, Stable Diffusion 3 or AuraFlow weights under our names; None for another file.

    Args:
        state_dict: Tensors by the library's keys; those without a name of ours are left out.
        output_prefix: Put before our names.
    """
    names = _names_for(state_dict)
    if names is None:
        return None
    converted: dict[str, Tensor] = {}
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for key, value in state_dict.items():
        target: Any = names.get(key)
        if target is None:
            continue
        if isinstance(target, str):
            converted[output_prefix + target] = value
            continue
        name, place, *change = target
        if change:
            converted[output_prefix + name] = change[0](value)
        else:
            parts.setdefault(output_prefix + name, []).append((place[1], value))
    for name, found in parts.items():
        converted[name] = torch.cat([value for _, value in sorted(found, key=lambda part: part[0])])
    return converted


def _names_for(state_dict: Mapping[str, Tensor]) -> Mapping[str, Any] | None:
    """The library's names of this network."""
    joint = count_parts(state_dict, "transformer_blocks.")
    if "x_embedder.weight" in state_dict and FLUX_MARK in state_dict:
        return flux_to_diffusers(
            {
                "depth": joint,
                "depth_single_blocks": count_parts(state_dict, "single_transformer_blocks."),
                "hidden_size": state_dict["x_embedder.weight"].shape[0],
            }
        )
    if AURAFLOW_MARK in state_dict:
        doubles = count_parts(state_dict, "joint_transformer_blocks.")
        singles = count_parts(state_dict, "single_transformer_blocks.")
        return auraflow_to_diffusers({"n_double_layers": doubles, "n_layers": doubles + singles})
    if "pos_embed.proj.weight" in state_dict and MMDIT_MARK in state_dict:
        depth = state_dict["pos_embed.proj.weight"].shape[0] // HEAD
        return mmdit_to_diffusers({"depth": depth, "num_blocks": joint})
    return None
