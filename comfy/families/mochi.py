"""Mochi 1: text to video, conditioned on T5-XXL."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import conds, latent_formats
from comfy.families.base import BaseModel
from comfy.families.dit_layout import Shapes
from comfy.families.family import (
    BrokenModelError,
    ClipTarget,
    StateDict,
    TransformerFamily,
)
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import t5_dtype
from comfy.ldm.genmo.model import AsymmDiTJoint
from comfy.text_encoders import t5_alone

MARK = "t5_yproj.weight"
# Of every published network, whatever its size.
CONSTANTS: dict[str, Any] = {
    "image_model": "mochi_preview", "mlp_ratio_x": 4.0, "mlp_ratio_y": 4.0, "learn_sigma": False,
    "qk_norm": True, "qkv_bias": False, "out_bias": True, "attn_drop": 0.0,
    "patch_embed_bias": True, "posenc_preserve_area": True, "timestep_mlp_bias": True,
    "attend_to_padding": False, "timestep_scale": 1000.0, "use_t5": True, "t5_token_length": 256,
    "rope_theta": 10000.0,
}  # fmt: skip


def read_mochi_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """Configuration of the Mochi network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing or
            impossible.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "Mochi")
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    heads = shapes["pos_frequencies"][1]
    if width % heads:
        raise BrokenModelError(
            f"{prefix}x_embedder.proj.weight makes {width} channels, which the {heads} heads of "
            f"{prefix}pos_frequencies do not divide"
        )
    text_width, text_channels = shapes[MARK]
    return {
        **CONSTANTS,
        "depth": shapes.count("blocks."),
        "patch_size": patch,
        "num_heads": heads,
        "hidden_size_x": width,
        "hidden_size_y": text_width,
        "in_channels": channels,
        "t5_feat_dim": text_channels,
    }


class MochiModel(BaseModel):
    """Text, its mask, and how many of its tokens count."""

    network = AsymmDiTJoint
    usual_type = ModelType.FLOW
    text_width = "t5_feat_dim"

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Texts of different length do not run together: the layers are given no padding."""
        made = super().extra_conds(**kwargs)
        mask = kwargs.get("attention_mask")
        if mask is not None:
            made["attention_mask"] = conds.CONDRegular(mask)
            made["num_tokens"] = conds.CONDConstant(max(1, int(mask.sum())))
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDRegular(kwargs["cross_attn"])
        return made


class GenmoMochi(TransformerFamily):
    """Mochi 1."""

    unet_config: dict[str, Any] = {"image_model": "mochi_preview"}
    read_config = staticmethod(read_mochi_config)
    sampling_settings = {"multiplier": 1.0, "shift": 6.0}
    latent_format: Any = latent_formats.Mochi
    memory_usage_factor = 2.0
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    prediction = ModelType.FLOW
    base_model = MochiModel

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """T5-XXL."""
        return ClipTarget(
            t5_alone.t5_alone_tokenizer(t5_alone.MOCHI),
            t5_alone.t5_alone_clip(t5_alone.MOCHI, t5_dtype(state_dict)),
        )
