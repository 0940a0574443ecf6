"""Qwen-Image, conditioned on Qwen 2.5 7B, and Z-Image, conditioned on Qwen 3 4B."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from comfy import conds, latent_formats
from comfy.families.base import BaseModel
from comfy.families.family import ClipTarget, StateDict, TransformerFamily
from comfy.families.model_type import ModelType
from comfy.families.qwen_layout import read_lumina_config, read_qwen_config
from comfy.families.references import reference_conds, reference_shapes
from comfy.families.text_sizes import llm_dtype
from comfy.ldm.lumina.model import NextDiT
from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel
from comfy.text_encoders.qwen import (
    QwenImageTEModel,
    QwenImageTokenizer,
    ZImageTEModel,
    ZImageTokenizer,
    qwen_clip,
)


class QwenImageModel(BaseModel):
    """Text and reference pictures."""

    network = QwenImageTransformer2DModel
    usual_type = ModelType.FLUX
    memory_usage_factor_conds = ("ref_latents",)
    text_width = "joint_attention_dim"

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text of its own length, reference latents."""
        made = super().extra_conds(**kwargs)
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDRegular(kwargs["cross_attn"])
        return made | reference_conds(self, kwargs)

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, list[int]]:
        """Those of the reference latents."""
        return reference_shapes(self, kwargs)


class Lumina2Model(BaseModel):
    """Text with the number of its tokens; pooled text where the network takes it."""

    network: ClassVar[type[nn.Module]] = NextDiT
    usual_type = ModelType.FLOW
    text_width = "cap_feat_dim"

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text, and a mask where it hides something."""
        made = super().extra_conds(**kwargs)
        mask = kwargs.get("attention_mask")
        if mask is not None:
            if not bool(mask.all()):
                made["attention_mask"] = conds.CONDRegular(mask)
            made["num_tokens"] = conds.CONDConstant(max(1, int(mask.sum())))
        text = kwargs.get("cross_attn")
        if text is not None:
            made["c_crossattn"] = conds.CONDRegular(text)
            made.setdefault("num_tokens", conds.CONDConstant(text.shape[1]))
        pooled = kwargs.get("pooled_output")
        if pooled is not None and "clip_text_dim" in self.model_config.unet_config:
            made["clip_text_pooled"] = conds.CONDRegular(pooled)
        return made

    def conditioning_widths(self) -> dict[str, int]:
        """See the base; NewBie takes pooled text, too."""
        pooled = self.model_config.unet_config.get("clip_text_dim")
        widths = super().conditioning_widths()
        return widths if pooled is None else {**widths, "clip_text_pooled": pooled}


class QwenImage(TransformerFamily):
    """Qwen-Image."""

    unet_config: dict[str, Any] = {"image_model": "qwen_image"}
    read_config = staticmethod(read_qwen_config)
    latent_format: Any = latent_formats.Wan21
    memory_usage_factor = 1.8
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    sampling_settings = {"multiplier": 1.0, "shift": 1.15}
    prediction = ModelType.FLUX
    base_model = QwenImageModel

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Qwen 2.5 7B."""
        return ClipTarget(QwenImageTokenizer, qwen_clip(QwenImageTEModel, llm_dtype(state_dict)))


class ZImage(TransformerFamily):
    """Z-Image."""

    unet_config: dict[str, Any] = {"image_model": "lumina2", "z_image_modulation": True}
    read_config = staticmethod(read_lumina_config)
    latent_format: Any = latent_formats.Flux
    memory_usage_factor = 2.0
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    sampling_settings = {"multiplier": 1.0, "shift": 3.0}
    prediction = ModelType.FLOW
    base_model = Lumina2Model

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Qwen 3 4B."""
        return ClipTarget(ZImageTokenizer, qwen_clip(ZImageTEModel, llm_dtype(state_dict)))
