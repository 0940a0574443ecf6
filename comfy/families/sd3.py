"""Stable Diffusion 3 and 3.5: a transformer over patches of 16-channel latents, conditioned on
CLIP ViT-L, OpenCLIP ViT-bigG and T5-XXL, each of which a file may lack.
"""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy import latent_formats
from comfy.families import dit_model
from comfy.families.dit_layout import read_mmdit_config
from comfy.families.family import ClipTarget, ModelFamily, StateDict
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import t5_dtype
from comfy.text_encoders.sd3 import SD3Tokenizer, sd3_clip

ENCODERS = ("clip_l", "clip_g", "t5xxl")  # in the order of the arguments


class SD3(ModelFamily):
    """Stable Diffusion 3."""

    unet_config: dict[str, Any] = {"pos_embed_scaling_factor": None}
    read_config = staticmethod(read_mmdit_config)
    latent_format: Any = latent_formats.SD3
    memory_usage_factor = 1.6
    sampling_settings = {"shift": 3.0}
    prediction = ModelType.FLOW
    base_model = dit_model.SD3
    text_encoder_key_prefix = ["text_encoders."]

    @classmethod
    def matches(
        cls, unet_config: Mapping[str, Any], state_dict: Mapping[str, Tensor] | None = None
    ) -> bool:
        """Joint blocks over a latent and nothing beside it."""
        is_plain = unet_config.get("in_channels") == unet_config.get("out_channels")
        has_blocks = "x_block_self_attn_layers" in unet_config
        return super().matches(unet_config, state_dict) and has_blocks and is_plain

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Those of the three encoders that the file holds."""
        keys = list(state_dict or {})
        clip_l, clip_g, t5 = (any(f"{name}.transformer." in k for k in keys) for name in ENCODERS)
        return ClipTarget(SD3Tokenizer, sd3_clip(clip_l, clip_g, t5, t5_dtype(state_dict)))
