"""Qwen-Image, conditioned on Qwen 2.5 7B, and Z-Image, conditioned on Qwen 3 4B."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

import math
from typing import Any

import torch

from comfy import conds, latent_formats
from comfy.families.base import BaseModel
from comfy.families.family import ClipTarget, ModelFamily, StateDict, TransformerFamily
from comfy.families.model_type import ModelType
from comfy.families.qwen_layout import read_lumina_config, read_qwen_config
from comfy.families.references import shown_latents
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

    def __init__(
        self,
        model_config: ModelFamily,
        model_type: ModelType | None = ModelType.FLUX,
        device: torch.device | str | None = None,
    ) -> None:
        network = QwenImageTransformer2DModel
        super().__init__(model_config, model_type, device=device, unet_model=network)
        self.memory_usage_factor_conds = ("ref_latents",)

    def conditioning_widths(self) -> dict[str, int]:
        """Width of the text tokens."""
        width = self.model_config.unet_config.get("joint_attention_dim")
        return {} if width is None else {"c_crossattn": int(width)}

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text of its own length, reference latents."""
        made = super().extra_conds(**kwargs)
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDRegular(kwargs["cross_attn"])
        references = kwargs.get("reference_latents")
        if references is not None:
            made["ref_latents"] = conds.CONDList(shown_latents(self, references))
            method = kwargs.get("reference_latents_method")
            if method is not None:
                made["ref_latents_method"] = conds.CONDConstant(method)
        return made

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, list[int]]:
        """Reference latents weigh like a latent of their joint size."""
        references = kwargs.get("reference_latents")
        if references is None:
            return {}
        channels = self.latent_format.latent_channels
        cells = sum(math.prod(latent.shape) for latent in references) // channels
        return {"ref_latents": [1, channels, cells]}


class Lumina2Model(BaseModel):
    """Text with the number of its tokens."""

    def __init__(
        self,
        model_config: ModelFamily,
        model_type: ModelType | None = ModelType.FLOW,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(model_config, model_type, device=device, unet_model=NextDiT)

    def conditioning_widths(self) -> dict[str, int]:
        """Width of the text tokens."""
        width = self.model_config.unet_config.get("cap_feat_dim")
        return {} if width is None else {"c_crossattn": int(width)}

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
        return made


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
