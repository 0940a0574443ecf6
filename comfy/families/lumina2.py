"""Lumina-Image 2.0, conditioned on Gemma 2 2B, and NewBie, on Gemma 3 4B and Jina CLIP v2."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from comfy import latent_formats
from comfy.families.family import ClipTarget, StateDict, TransformerFamily
from comfy.families.model_type import ModelType
from comfy.families.qwen_image import Lumina2Model
from comfy.families.qwen_layout import read_lumina2_config
from comfy.families.text_sizes import llm_dtype
from comfy.text_encoders.lumina2 import LuminaTokenizer, te
from comfy.text_encoders.newbie import IN_CHECKPOINTS, NewBieTokenizer, newbie_clip


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
        """Gemma 2 2B; of NewBie Gemma 3 4B and Jina CLIP v2."""
        if "clip_text_dim" in self.unet_config:
            return ClipTarget(NewBieTokenizer, newbie_clip(llm_dtype(state_dict)))
        return ClipTarget(LuminaTokenizer, te(llm_dtype(state_dict)))

    def process_clip_state_dict(self, state_dict: StateDict) -> StateDict:
        """See the base; checkpoints of NewBie name its encoders shortly."""
        own = super().process_clip_state_dict(state_dict)
        return _renamed(own, {short: name for name, short in IN_CHECKPOINTS.items()})

    def process_clip_state_dict_for_saving(self, state_dict: StateDict) -> StateDict:
        """Inverse of `process_clip_state_dict`."""
        names = IN_CHECKPOINTS if "clip_text_dim" in self.unet_config else {}
        return super().process_clip_state_dict_for_saving(_renamed(state_dict, names))


def _renamed(state_dict: StateDict, names: Mapping[str, str]) -> StateDict:
    """Entries with the first part of their keys renamed."""
    parts = {key: key.partition(".") for key in state_dict}
    return {
        f"{names.get(first, first)}{point}{rest}": state_dict[key]
        for key, (first, point, rest) in parts.items()
    }
