"""Lumina-Image 2.0: text to picture, conditioned on Gemma 2 2B."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from typing import Any

import torch

from comfy import latent_formats
from comfy.families.family import ClipTarget, StateDict, TransformerFamily
from comfy.families.model_type import ModelType
from comfy.families.qwen_image import Lumina2Model
from comfy.families.qwen_layout import read_lumina2_config
from comfy.families.text_sizes import llm_dtype
from comfy.text_encoders.lumina2 import LuminaTokenizer, te


class Lumina2(TransformerFamily):
    """Lumina 2."""

    unet_config: dict[str, Any] = {"image_model": "lumina2"}
    read_config = staticmethod(read_lumina2_config)
    latent_format: Any = latent_formats.Flux
    memory_usage_factor = 1.4
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    sampling_settings = {"multiplier": 1.0, "shift": 6.0}
    prediction = ModelType.FLOW
    base_model = Lumina2Model

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Gemma 2 2B."""
        return ClipTarget(LuminaTokenizer, te(llm_dtype(state_dict)))
