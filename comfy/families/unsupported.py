"""Families whose files are recognised but cannot be loaded: their networks are not built in.

They are named so that a person is told what the file is, instead of that it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A key that every network of the family has (below the prefix) -> its name; the first match wins.
MARKS: tuple[tuple[str, str], ...] = (
    ("clip_txt_mapper.weight", "Stable Cascade, stage C"),
    ("clip_mapper.weight", "Stable Cascade, stage B"),
    ("transformer.rotary_pos_emb.inv_freq", "Stable Audio"),
    ("double_layers.0.attn.w1q.weight", "AuraFlow"),
    ("mlp_t5.0.weight", "Hunyuan-DiT"),
    ("txt_in.individual_token_refiner.blocks.0.norm1.weight", "HunyuanVideo or HunyuanImage"),
    ("distilled_guidance_layer.norms.0.scale", "Chroma"),
    ("distilled_guidance_layer.0.norms.0.scale", "Chroma"),
    ("double_stream_modulation_img.lin.weight", "FLUX.2"),
    ("t5_yproj.weight", "Mochi"),
    ("adaln_single.emb.timestep_embedder.linear_1.bias", "LTX video or PixArt"),
    ("genre_embedder.weight", "ACE-Step"),
    ("t_block.1.weight", "PixArt"),
    ("blocks.block0.blocks.0.block.attn.to_q.0.weight", "Cosmos 1"),
    ("cap_embedder.1.weight", "Lumina 2 or Z-Image"),
    ("head.modulation", "Wan"),
    ("latent_in.weight", "Hunyuan3D 2"),
    ("t_embedder.mlp.2.weight", "Hunyuan3D 2.1"),
    ("caption_projection.0.linear.weight", "HiDream"),
    ("blocks.0.mlp.layer1.weight", "Cosmos Predict 2"),
    ("time_caption_embed.timestep_embedder.linear_1.bias", "OmniGen 2"),
    ("txt_norm.weight", "Qwen-Image"),
    ("visual_transformer_blocks.0.cross_attention.key_norm.weight", "Kandinsky 5"),
)


def name_of(state_dict: Mapping[str, Any], prefix: str) -> str | None:
    """The family of a network that is known by name only; None for any other file."""
    for key, name in MARKS:
        if prefix + key in state_dict or key in state_dict:
            return name
    return None
