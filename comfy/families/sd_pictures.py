"""Families of the Stable Diffusion UNet that are shown a picture.

Stable Zero123 is a 1.x network, unCLIP, Lotus and the x4 upscaler are 2.x ones, Stable Video
Diffusion and SV3D have temporal layers beside.
"""
# ruff: noqa: ARG002, RUF012 - hooks of the base; class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from comfy import latent_formats
from comfy.families import picture_models
from comfy.families.base import BaseModel
from comfy.families.family import ClipTarget, ModelFamily, StateDict
from comfy.families.model_type import ModelType
from comfy.families.sd15 import SD15
from comfy.families.sd20 import SD20, UPSCALER_CHANNELS
from comfy.families.unet_layout import read_unet_config

PROJECTION = "cc_projection."
HALF_L, HALF_H = 768, 1024  # channels of the image embeddings of CLIP ViT-L and OpenCLIP ViT-H


class Stable_Zero123(SD15):
    """Stable Zero123."""

    unet_config = {**SD15.unet_config, "in_channels": 8}
    required_keys = (f"{PROJECTION}weight", f"{PROJECTION}bias")
    clip_vision_prefix = "cond_stage_model.model.visual."
    memory_usage_factor = 2.0

    @classmethod
    def matches(
        cls, unet_config: Mapping[str, Any], state_dict: Mapping[str, Tensor] | None = None
    ) -> bool:
        """The network of instruct-pix2pix with a projection in front."""
        if state_dict is None:
            return False
        return super(SD15, cls).matches(unet_config, state_dict)

    def inpaint_model(self) -> bool:
        """Never: its further channels are the picture."""
        return False

    def get_model(
        self, state_dict: StateDict, prefix: str = "", device: torch.device | str | None = None
    ) -> BaseModel:
        """The Zero123 base model, with its projection."""
        return picture_models.Stable_Zero123(
            self,
            model_type=self.model_type(state_dict, prefix),
            device=device,
            cc_projection_weight=state_dict[f"{PROJECTION}weight"],
            cc_projection_bias=state_dict[f"{PROJECTION}bias"],
        )

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget | None:  # type: ignore[override]
        """None: it is conditioned on a picture."""
        return None


class SD21UnclipL(SD20):
    """Stable Diffusion 2.1 unCLIP with CLIP ViT-L."""

    unet_config = {**SD20.unet_config, "adm_in_channels": 2 * HALF_L}
    base_model = picture_models.SD21UNCLIP
    clip_vision_prefix = "embedder.model.visual."
    noise_aug_config = {
        "noise_schedule_config": {"timesteps": 1000, "beta_schedule": "squaredcos_cap_v2"},
        "timestep_dim": HALF_L,
    }


class SD21UnclipH(SD21UnclipL):
    """Stable Diffusion 2.1 unCLIP with OpenCLIP ViT-H."""

    unet_config = {**SD20.unet_config, "adm_in_channels": 2 * HALF_H}
    noise_aug_config = {**(SD21UnclipL.noise_aug_config or {}), "timestep_dim": HALF_H}


class LotusD(SD20):
    """Lotus D, depth or normals of a picture."""

    unet_config = {**SD20.unet_config, "adm_in_channels": 4, "in_channels": 4}
    unet_extra_config = {"num_classes": "sequential"}
    base_model = picture_models.Lotus

    def __init__(self, unet_config: dict[str, Any]) -> None:
        super().__init__({**unet_config, **SD20.unet_extra_config})

    def model_type(self, state_dict: StateDict, prefix: str = "") -> ModelType:
        """One step from picture to picture."""
        return ModelType.IMG_TO_IMG


class SD_X4Upscaler(SD20):
    """Stable Diffusion x4 upscaler."""

    unet_config = {**SD20.unet_config, "in_channels": UPSCALER_CHANNELS}
    unet_extra_config = {
        "disable_self_attentions": [True, True, True, False],
        "num_classes": 1000,  # steps of noise on the small picture
        "num_heads": 8,
        "num_head_channels": -1,
    }
    latent_format: Any = latent_formats.SD_X4
    sampling_settings = {"linear_start": 0.0001, "linear_end": 0.02}
    prediction = ModelType.V_PREDICTION
    base_model = picture_models.SD_X4Upscaler

    @classmethod
    def matches(
        cls, unet_config: Mapping[str, Any], state_dict: Mapping[str, Tensor] | None = None
    ) -> bool:
        """A 2.x network with three more channels."""
        return super(SD20, cls).matches(unet_config, state_dict)

    def inpaint_model(self) -> bool:
        """Never: its further channels are the small picture."""
        return False


VIDEO = {
    "in_channels": 8,
    "use_linear_in_transformer": True,
    "use_temporal_attention": True,
    "use_temporal_resblock": True,
}


class SVD_img2vid(ModelFamily):
    """Stable Video Diffusion."""

    unet_config: dict[str, Any] = {**VIDEO, "adm_in_channels": 768}
    unet_extra_config = {
        "num_heads": -1,
        "num_head_channels": 64,
        "attn_precision": torch.float32,  # its scores leave the range of float16
    }
    read_config = staticmethod(read_unet_config)
    latent_format: Any = latent_formats.SD15
    sampling_settings = {"sigma_max": 700.0, "sigma_min": 0.002}
    prediction = ModelType.V_PREDICTION_EDM
    clip_vision_prefix = "conditioner.embedders.0.open_clip.model.visual."
    base_model = picture_models.SVD_img2vid


class SV3D_u(SVD_img2vid):
    """SV3D without camera angles."""

    unet_config = {**VIDEO, "adm_in_channels": 256}
    vae_key_prefix = ["conditioner.embedders.1.encoder."]
    base_model: ClassVar[Any] = picture_models.SV3D_u


class SV3D_p(SV3D_u):
    """SV3D with camera angles."""

    unet_config = {**VIDEO, "adm_in_channels": 1280}
    base_model = picture_models.SV3D_p
