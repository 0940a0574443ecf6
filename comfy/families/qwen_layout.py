"""Reads the configurations of Qwen-Image, Z-Image and Lumina 2 from keys and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy.families.dit_layout import Shapes, position_axes

QWEN_MARK = "txt_norm.weight"
LUMINA_MARK = "cap_embedder.1.weight"
HEAD_MARK = "layers.0.attention.q_norm.weight"
PATCH = 2
Z_FEED_FORWARD = 8 / 3  # of the width
LUMINA_FEED_FORWARD = 4.0
NEWBIE_MARK = "clip_text_pooled_proj.0.weight"  # of a relative that looks at pooled text, too


def read_qwen_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """Configuration of the Qwen-Image network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing.
    """
    if prefix + QWEN_MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "Qwen-Image")
    width, channels = shapes["img_in.weight"]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    config: dict[str, Any] = {
        "image_model": "qwen_image",
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // PATCH**2,
        "num_layers": shapes.count("transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes[QWEN_MARK][0],
        "axes_dims_rope": position_axes(head),
    }
    if "time_text_embed.addition_t_embedding.weight" in shapes:
        config.update(use_additional_t_cond=True, default_ref_method="negative_index")
    elif "__index_timestep_zero__" in shapes:
        config["default_ref_method"] = "index_timestep_zero"
    return config


def read_lumina_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """Configuration of the Z-Image network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing.
    """
    narrow = "layers.0.adaLN_modulation.0.weight"
    if prefix + LUMINA_MARK not in state_dict or prefix + narrow not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "Z-Image")
    head = shapes[HEAD_MARK][0]
    config: dict[str, Any] = {
        **_lumina_sizes(shapes, Z_FEED_FORWARD),
        "axes_dims": [head // 4, head * 3 // 8, head * 3 // 8],
        "axes_lens": [1536, 512, 512],
        "rope_theta": 256.0,
        "z_image_modulation": True,
        "time_scale": 1000.0,
    }
    if "cap_pad_token" in shapes:
        config["pad_tokens_multiple"] = 32
    return config


def read_lumina2_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """As `read_lumina_config`, of Lumina 2: a wide modulation, positions in thirds of a head."""
    wide = "layers.0.adaLN_modulation.1.weight"
    if prefix + "cap_pad_token" in state_dict or any(
        prefix + key not in state_dict for key in (LUMINA_MARK, wide)
    ):
        return None
    shapes = Shapes(state_dict, prefix, "Lumina 2")
    head = shapes[HEAD_MARK][0]
    side = head // 6 * 2
    config = {
        **_lumina_sizes(shapes, LUMINA_FEED_FORWARD),
        "axes_dims": [head - 2 * side, side, side],
        "axes_lens": [300, 512, 512],
        "rope_theta": 10000.0,
    }
    if NEWBIE_MARK in shapes:
        config["clip_text_dim"] = shapes[NEWBIE_MARK][0]
    return config


def _lumina_sizes(shapes: Shapes, feed_forward: float) -> dict[str, Any]:
    """Sizes that Lumina 2 and Z-Image read from the same weights.

    Args:
        feed_forward: Inner width of the full-size network's feed-forward layers, in widths.
    """
    dim, text_width = shapes[LUMINA_MARK]
    head = shapes[HEAD_MARK][0]
    rows = shapes["layers.0.attention.qkv.weight"][0]
    inner = shapes["layers.0.feed_forward.w1.weight"][0]
    heads = dim // head
    config: dict[str, Any] = {
        "image_model": "lumina2",
        "patch_size": PATCH,
        "in_channels": shapes["x_embedder.weight"][1] // PATCH**2,
        "dim": dim,
        "cap_feat_dim": text_width,
        "n_layers": shapes.count("layers."),
        "n_refiner_layers": shapes.count("noise_refiner."),
        "qk_norm": True,
        "n_heads": heads,
        "n_kv_heads": (rows // head - heads) // 2,
        "ffn_dim_multiplier": feed_forward,
    }
    if inner != -(-int(feed_forward * dim) // 256) * 256:  # not the full-size network
        config.update(ffn_dim_multiplier=inner / dim, multiple_of=1)
    return config
