"""Stable Diffusion 2.x: the UNet of 1.x with linear projections, conditioned on OpenCLIP ViT-H."""
# ruff: noqa: ARG002, RUF012 - hooks of the base; class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import latent_formats
from comfy.families import openclip
from comfy.families.family import (
    ClipTarget,
    StateDict,
    UNetFamily,
    add_prefix,
    replace_prefixes,
)
from comfy.families.model_type import ModelType
from comfy.families.unet_layout import read_unet_config
from comfy.text_encoders.sd2 import SD2ClipModel, SD2Tokenizer

# The norms of the last transformer spread further in networks trained for velocity: 2.1 at 768
# pixels has about 0.1, 2.0 at 512 pixels about 0.06.
VELOCITY_NORM = "output_blocks.11.1.transformer_blocks.0.norm1.bias"
VELOCITY_SPREAD = 0.09
UPSCALER_CHANNELS = 7


class SD20(UNetFamily):
    """Stable Diffusion 2.x."""

    unet_config = {
        "use_linear_in_transformer": True,
        "adm_in_channels": None,
        "use_temporal_attention": False,
    }
    unet_extra_config = {
        "num_heads": -1,
        "num_head_channels": 64,
        # Its attention scores leave the range of float16.
        "attn_precision": torch.float32,
    }
    read_config = staticmethod(read_unet_config)
    latent_format = latent_formats.SD15
    memory_usage_factor = 1.0

    @classmethod
    def matches(
        cls, unet_config: Mapping[str, Any], state_dict: Mapping[str, Tensor] | None = None
    ) -> bool:
        """Linear projections around its transformers and no class embedding.

        The x4 upscaler shares the layout and takes the small picture as three more channels.
        """
        is_upscaler = unet_config.get("in_channels") == UPSCALER_CHANNELS
        has_context = unet_config.get("context_dim") is not None
        return super().matches(unet_config, state_dict) and has_context and not is_upscaler

    def model_type(self, state_dict: StateDict, prefix: str = "") -> ModelType:
        """Velocity for the 768-pixel checkpoints, told by the spread of one norm."""
        norm = state_dict.get(prefix + VELOCITY_NORM)
        takes_latent_only = self.unet_config["in_channels"] == 4
        if not takes_latent_only or norm is None or norm.is_meta:
            return ModelType.EPS
        spread = torch.std(norm.float(), unbiased=False)
        return ModelType.V_PREDICTION if spread > VELOCITY_SPREAD else ModelType.EPS

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """OpenCLIP ViT-H."""
        return ClipTarget(SD2Tokenizer, SD2ClipModel)

    def process_clip_state_dict(self, state_dict: StateDict) -> StateDict:
        """From OpenCLIP's layout, below either of the two prefixes in use."""
        renames = {
            "conditioner.embedders.0.model.": "clip_h.",
            "cond_stage_model.model.": "clip_h.",
        }
        named = replace_prefixes(state_dict, renames)
        scale = named.pop("clip_h.logit_scale", None)
        converted = openclip.to_clip(named, "clip_h.", "clip_h.transformer.")
        return converted if scale is None else {**converted, "clip_h.logit_scale": scale}

    def process_clip_state_dict_for_saving(self, state_dict: StateDict) -> StateDict:
        """Back to OpenCLIP's layout."""
        inner = replace_prefixes(state_dict, {"clip_h.transformer.": "", "clip_h.": ""})
        return add_prefix(openclip.from_clip(inner, "", ""), "cond_stage_model.model.")
