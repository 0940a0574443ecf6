"""FLUX.1: a transformer over patches of 16-channel latents, conditioned on T5-XXL and CLIP ViT-L.

"dev" models were taught a guidance scale, "schnell" ones were not; "fill", "depth" and "canny" take
more channels beside the latent.
"""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from typing import Any

import torch

from comfy import latent_formats
from comfy.families import dit_model
from comfy.families.dit_layout import read_flux_config
from comfy.families.family import ClipTarget, StateDict, TransformerFamily
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import llm_dtype, t5_dtype
from comfy.text_encoders import ovis
from comfy.text_encoders.flux import FluxTokenizer, flux_clip

FILL_CHANNELS = 96  # latent, masked picture, and 64 pixels of the mask


class Flux(TransformerFamily):
    """FLUX.1 dev."""

    unet_config: dict[str, Any] = {"image_model": "flux", "guidance_embed": True}
    read_config = staticmethod(read_flux_config)
    latent_format: Any = latent_formats.Flux
    memory_usage_factor = 3.1
    prediction = ModelType.FLUX
    base_model = dit_model.Flux
    supported_inference_dtypes = [torch.bfloat16, torch.float16, torch.float32]

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """T5-XXL and CLIP ViT-L; Qwen 3 2B for Ovis-Image."""
        if any(f"{ovis.NAME}." in key for key in state_dict or ()):
            return ClipTarget(ovis.OvisTokenizer, ovis.te(llm_dtype(state_dict)))
        return ClipTarget(FluxTokenizer, flux_clip(t5_dtype(state_dict)))


class FluxInpaint(Flux):
    """FLUX.1 fill."""

    unet_config = {**Flux.unet_config, "in_channels": FILL_CHANNELS}
    supported_inference_dtypes = [torch.bfloat16, torch.float32]


class FluxSchnell(Flux):
    """FLUX.1 schnell."""

    unet_config = {"image_model": "flux", "guidance_embed": False}
    sampling_settings = {"multiplier": 1.0, "shift": 1.0}
    prediction = ModelType.FLOW
