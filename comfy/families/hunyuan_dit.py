"""Hunyuan-DiT: a transformer over pictures, conditioned on BERT and mT5-XL."""
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
from comfy.ldm.hydit.models import POOLED, HunYuanDiT
from comfy.text_encoders.hydit import HyditModel, HyditTokenizer

MARK = "mlp_t5.0.weight"
USUAL_SIZES, USUAL_RATIO = (1408, 40), 4.3637  # what the published networks are known by
# Network input -> the option of the conditioning that it is.
TEXTS = {
    "c_crossattn": "cross_attn",
    "text_embedding_mask": "attention_mask",
    "encoder_hidden_states_t5": "conditioning_mt5xl",
    "text_embedding_mask_t5": "attention_mask_mt5xl",
}


def read_hunyuan_dit_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the Hunyuan-DiT network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing or
            impossible.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "Hunyuan-DiT")
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    head = shapes["blocks.0.attn1.q_norm.weight"][0]
    if width % head:
        raise BrokenModelError(
            f"{prefix}x_embedder.proj.weight makes {width} channels, which heads of {head} "
            "channels do not divide"
        )
    texts, text_width = shapes["text_embedding_padding"]
    t5_texts = shapes["pooler.positional_embedding"][0] - 1
    depth = shapes.count("blocks.")
    ratio = shapes["blocks.0.mlp.fc1.weight"][0] / width
    is_first = shapes["extra_embedder.0.weight"][1] > POOLED  # told sizes and a style
    config: dict[str, Any] = {
        "image_model": "hydit1" if is_first else "hydit",
        "depth": depth,
        "hidden_size": width,
        "mlp_ratio": USUAL_RATIO if (width, depth) == USUAL_SIZES else ratio,
        "num_heads": width // head,
        "patch_size": patch,
        "in_channels": channels,
        "text_states_dim": text_width,
        "text_states_dim_t5": shapes[MARK][1],
        "text_len": texts - t5_texts,
        "text_len_t5": t5_texts,
    }
    return {**config, "size_cond": True, "use_style_cond": True} if is_first else config


class HunyuanDiTModel(BaseModel):
    """Two texts with their masks, and the picture's sizes."""

    network = HunYuanDiT
    usual_type = ModelType.V_PREDICTION

    def conditioning_widths(self) -> dict[str, int]:
        """Widths of the tokens of both encoders."""
        config = self.model_config.unet_config
        names = {"c_crossattn": "text_states_dim", "encoder_hidden_states_t5": "text_states_dim_t5"}
        return {name: int(config[width]) for name, width in names.items() if width in config}

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Texts, not repeated to match others; height and width twice, and no crop."""
        made = super().extra_conds(**kwargs)
        for name, option in TEXTS.items():
            if kwargs.get(option) is not None:
                made[name] = conds.CONDRegular(kwargs[option])
        height, width = kwargs.get("height", 768), kwargs.get("width", 768)
        target = [kwargs.get("target_height", height), kwargs.get("target_width", width)]
        sizes = torch.tensor([[height, width, *target, 0, 0]], dtype=torch.float32)
        made["image_meta_size"] = conds.CONDRegular(sizes)
        return made


class HunyuanDiT(TransformerFamily):
    """Hunyuan-DiT 1.2."""

    unet_config: dict[str, Any] = {"image_model": "hydit"}
    unet_extra_config: dict[str, Any] = {"attn_precision": torch.float32}
    read_config = staticmethod(read_hunyuan_dit_config)
    sampling_settings = {"linear_start": 0.00085, "linear_end": 0.018}
    latent_format: Any = latent_formats.SDXL
    memory_usage_factor = 1.3
    prediction = ModelType.V_PREDICTION
    base_model = HunyuanDiTModel

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """BERT and mT5-XL."""
        del state_dict  # weights have the types that are asked for
        return ClipTarget(HyditTokenizer, HyditModel)


class HunyuanDiT1(HunyuanDiT):
    """Hunyuan-DiT 1.0 and 1.1."""

    unet_config = {"image_model": "hydit1"}
    unet_extra_config: dict[str, Any] = {}
    sampling_settings = {"linear_start": 0.00085, "linear_end": 0.03}
