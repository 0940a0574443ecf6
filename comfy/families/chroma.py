"""Chroma: the blocks of FLUX.1 schnell with one network for their modulation, conditioned on
T5-XXL alone.
"""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from typing import Any, ClassVar

import torch

from comfy import latent_formats
from comfy.families import dit_model
from comfy.families.dit_layout import read_chroma_config
from comfy.families.family import ClipTarget, ModelFamily, StateDict
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import t5_dtype
from comfy.text_encoders.chroma import ChromaTokenizer, chroma_clip


class Chroma(ModelFamily):
    """Chroma."""

    unet_config: dict[str, Any] = {"image_model": "chroma"}
    read_config = staticmethod(read_chroma_config)
    sampling_settings = {"multiplier": 1.0}
    latent_format: Any = latent_formats.Flux
    memory_usage_factor = 3.2
    prediction = ModelType.FLUX
    base_model: ClassVar[Any] = dit_model.Chroma
    supported_inference_dtypes = [torch.bfloat16, torch.float16, torch.float32]

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """T5-XXL."""
        return ClipTarget(ChromaTokenizer, chroma_clip(t5_dtype(state_dict)))
