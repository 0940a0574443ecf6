"""Writes checkpoints in the Stable Diffusion 1.x layout with small networks of random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from comfy.ldm.clip.text import CLIPTextModel
from comfy.ldm.models.autoencoder import AutoencoderKL
from comfy.ldm.unet.model import UNetModel
from comfy.ops import disable_weight_init

UNET: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "model_channels": 16,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [0, 1],
    "transformer_depth_output": [0, 0, 1, 1],
    "transformer_depth_middle": 1,
    "context_dim": 32,
    "num_heads": 2,
    "norm_num_groups": 4,
}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
AUTOENCODER: dict[str, Any] = {
    "ch": 8,
    "out_ch": 3,
    "ch_mult": [1, 1, 1, 2],
    "num_res_blocks": 1,
    "attn_resolutions": [],
    "in_channels": 3,
    "resolution": 32,
    "z_channels": 4,
    "double_z": True,
    "norm_num_groups": 2,
}
HEADER = {
    "unet_config": json.dumps({"num_heads": 2, "norm_num_groups": 4}),
    "vae_config": json.dumps({"norm_num_groups": 2}),
    "text_config": json.dumps({"num_attention_heads": 2}),
}


def networks() -> dict[str, nn.Module]:
    """The three networks by the prefix their weights have in a file, without weights."""
    return {
        "model.diffusion_model.": UNetModel(**UNET, device="meta"),
        "cond_stage_model.transformer.": CLIPTextModel(
            TEXT, torch.float32, "meta", disable_weight_init
        ),
        "first_stage_model.": AutoencoderKL(ddconfig=AUTOENCODER, embed_dim=4, device="meta"),
    }


def weights(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """All weights of a checkpoint by the keys of the file."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for prefix, network in networks().items():
        for key, shape in ((key, value.shape) for key, value in network.state_dict().items()):
            if key.startswith("text_projection"):
                continue  # original files leave it out
            value = torch.randn(shape, generator=generator) * 0.05
            is_norm = len(shape) == 1 and key.endswith("weight")
            tensors[prefix + key] = (value + 1.0 if is_norm else value).to(dtype)
    return tensors


def write(
    path: Path,
    tensors: Mapping[str, Tensor] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Saves a checkpoint and returns its path."""
    save_file(dict(weights() if tensors is None else tensors), path, metadata or HEADER)
    return path
