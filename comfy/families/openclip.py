"""Text encoder keys between the layout of OpenCLIP, which SD 2.x and SDXL checkpoints use, and
CLIP's.

OpenCLIP keeps query, key and value projections of a layer in one matrix and the final projection
transposed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

StateDict = dict[str, Tensor]

# OpenCLIP's name within a layer -> CLIP's.
LAYER_PARTS = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
    "attn.out_proj": "self_attn.out_proj",
}
WHOLE_KEYS = {
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
LAYERS_BEFORE = "transformer.resblocks."
LAYERS_AFTER = "text_model.encoder.layers."
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def to_clip(state_dict: Mapping[str, Tensor], before: str, after: str) -> StateDict:
    """Renames and splits the entries below `before`; others are passed on unchanged.

    Args:
        state_dict: Tensors by key.
        before: Prefix of the OpenCLIP keys, such as `clip_h.model.`.
        after: Prefix of the CLIP keys, such as `clip_h.transformer.`.
    """
    renamed: StateDict = {}
    for key, value in state_dict.items():
        if key.startswith(before):
            renamed.update(_entry_to_clip(key[len(before) :], value, after))
        else:
            renamed[key] = value
    return renamed


def _entry_to_clip(key: str, value: Tensor, after: str) -> StateDict:
    if key in WHOLE_KEYS:
        return {after + WHOLE_KEYS[key]: value}
    if key == "text_projection":
        return {f"{after}text_projection.weight": value.transpose(0, 1).contiguous()}
    if key == "text_projection.weight":
        return {after + key: value}
    if not key.startswith(LAYERS_BEFORE):
        return {after + key: value}
    number, _, part = key[len(LAYERS_BEFORE) :].partition(".")
    layer = f"{after}{LAYERS_AFTER}{number}."
    if part.startswith("attn.in_proj_"):
        kind = part.removeprefix("attn.in_proj_")
        thirds = value.chunk(3, dim=0)
        return {
            f"{layer}self_attn.{projection}.{kind}": third
            for projection, third in zip(PROJECTIONS, thirds)
        }
    name, _, kind = part.rpartition(".")
    return {f"{layer}{LAYER_PARTS.get(name, name)}.{kind}": value}


def from_clip(state_dict: Mapping[str, Tensor], before: str, after: str) -> StateDict:
    """Inverse of `to_clip`: CLIP keys below `before` as OpenCLIP keys below `after`."""
    whole = {new: old for old, new in WHOLE_KEYS.items()}
    parts = {new: old for old, new in LAYER_PARTS.items()}
    renamed: StateDict = {}
    for key, value in state_dict.items():
        if not key.startswith(before):
            renamed[key] = value
            continue
        inner = key[len(before) :]
        if inner in whole:
            renamed[after + whole[inner]] = value
        elif inner == "text_projection.weight":
            renamed[f"{after}text_projection"] = value.transpose(0, 1).contiguous()
        elif inner.startswith(LAYERS_AFTER):
            renamed.update(_layer_from_clip(state_dict, key, before, after, parts))
        else:
            renamed[after + inner] = value
    return renamed


def _layer_from_clip(
    state_dict: Mapping[str, Tensor], key: str, before: str, after: str, parts: Mapping[str, str]
) -> StateDict:
    """One entry of a layer; the three projections come with the first of them."""
    root = f"{before}{LAYERS_AFTER}"
    number, _, part = key[len(root) :].partition(".")
    layer = f"{after}{LAYERS_BEFORE}{number}."
    name, _, kind = part.rpartition(".")
    projection = name.removeprefix("self_attn.")
    if projection not in PROJECTIONS:
        return {f"{layer}{parts.get(name, name)}.{kind}": state_dict[key]}
    if projection != PROJECTIONS[0]:
        return {}
    siblings = [f"{root}{number}.self_attn.{other}.{kind}" for other in PROJECTIONS]
    return {f"{layer}attn.in_proj_{kind}": torch.cat([state_dict[name] for name in siblings])}


def clip_text_transformers_convert(
    sd: Mapping[str, Tensor], prefix_from: str, prefix_to: str
) -> StateDict:
    """`to_clip` under the name custom nodes call."""
    return to_clip(sd, prefix_from, prefix_to)


def transformers_convert(
    sd: Mapping[str, Tensor],
    prefix_from: str,
    prefix_to: str,
    number: int,  # noqa: ARG001 - every layer found is converted
) -> StateDict:
    """`to_clip` under the name custom nodes call; `number` of layers is not needed."""
    return to_clip(sd, prefix_from, prefix_to)
