"""Reads the configuration of HunyuanVideo, HunyuanImage 2.1 and HunyuanVideo 1.5 from the keys and
shapes of their weights, under the network's names or those of published files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy.families.dit_layout import Shapes, position_axes
from comfy.families.family import BrokenModelError

MARK = "txt_in.individual_token_refiner.blocks.0.norm1.weight"
USUAL_HEAD = 128  # channels of a head where no norm tells
# Names of published files -> names of the network, in this order.
RENAMES = (
    (r"(t_embedder|vector_in|time_in|time_r_in|guidance_in)\.mlp\.0\.", r"\1.in_layer."),
    (r"(t_embedder|vector_in|time_in|time_r_in|guidance_in)\.mlp\.2\.", r"\1.out_layer."),
    (r"c_embedder\.linear_1\.", "c_embedder.in_layer."),
    (r"c_embedder\.linear_2\.", "c_embedder.out_layer."),
    (r"mod(ulation)?\.linear\.", r"mod\1.lin."),
    (r"mlp\.fc1\.", "mlp.0."),
    (r"mlp\.fc2\.", "mlp.2."),
    (r"_attn_qkv\.", "_attn.qkv."),
    (r"_attn_proj\.", "_attn.proj."),
    (r"_attn_([qk])_norm\.weight", r"_attn.norm.\1_norm.weight"),
    (r"(single_blocks\.\d+)\.([qk]_norm)\.weight", r"\1.norm.\2.weight"),
    (r"norm\.q_norm\.weight", "norm.query_norm.scale"),
    (r"norm\.k_norm\.weight", "norm.key_norm.scale"),
)


def usual_key(key: str) -> str:
    """A key of a published file under the network's name."""
    for pattern, name in RENAMES:
        key = re.sub(pattern, name, key)
    return key


def read_hunyuan_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the HunyuanVideo network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing.
    """
    if prefix + MARK not in state_dict:
        return None
    inner = {key[len(prefix) :]: v for key, v in state_dict.items() if key.startswith(prefix)}
    shapes = Shapes({usual_key(key): value for key, value in inner.items()}, "", "HunyuanVideo")
    width, channels, *patch = shapes["img_in.proj.weight"]
    norm = "double_blocks.0.img_attn.norm.key_norm.scale"
    head = shapes[norm][0] if norm in shapes else USUAL_HEAD
    if width % head:
        raise BrokenModelError(
            f"{prefix}img_in.proj.weight makes {width} channels, which heads of {head} channels do "
            "not divide"
        )
    pooled = "vector_in.in_layer.weight"
    seen = "vision_in.proj.0.weight"
    return {
        "image_model": "hunyuan_video",
        "in_channels": channels,
        "patch_size": patch,
        "out_channels": shapes["final_layer.linear.weight"][0] // math.prod(patch),
        "vec_in_dim": shapes[pooled][1] if pooled in shapes else None,
        "axes_dim": [head // 2] * 2 if len(patch) == 2 else position_axes(head),
        "meanflow": "time_r_in.in_layer.weight" in shapes,
        "context_in_dim": shapes["txt_in.input_embedder.weight"][1],
        "hidden_size": width,
        "mlp_ratio": shapes["double_blocks.0.img_mlp.0.weight"][0] / width,
        "num_heads": width // head,
        "depth": shapes.count("double_blocks."),
        "depth_single_blocks": shapes.count("single_blocks."),
        "theta": 256,
        "qkv_bias": True,
        "byt5": "byt5_in.fc1.weight" in shapes,
        "guidance_embed": "guidance_in.in_layer.weight" in shapes,
        "use_cond_type_embedding": "cond_type_embedding.weight" in shapes,
        "vision_in_dim": shapes[seen][0] if seen in shapes else None,
        "meanflow_sum": seen in shapes,
    }
