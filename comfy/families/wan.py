"""Wan 2.1 and 2.2: video transformers, conditioned on UMT5-XXL.

Text to video, picture to video (also of first and last frame), control videos, a camera's path. The
networks of 2.2 come as pairs, one for high and one for low noise; each loads by itself.
"""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from typing import Any, ClassVar

import torch

from comfy import latent_formats
from comfy.families import wan_model
from comfy.families.base import BaseModel
from comfy.families.family import ClipTarget, StateDict, TransformerFamily
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import t5_dtype
from comfy.families.wan_layout import read_wan_config
from comfy.text_encoders.umt5 import WanT5Tokenizer, wan_clip

USUAL_WIDTH, WIDTH_OF_FACTOR_ONE = 2000, 2222


class WAN21_T2V(TransformerFamily):
    """Wan 2.1 and 2.2 text to video."""

    unet_config: dict[str, Any] = {"image_model": "wan2.1", "model_type": "t2v"}
    read_config = staticmethod(read_wan_config)
    latent_format: Any = latent_formats.Wan21
    sampling_settings = {"shift": 8.0}
    memory_usage_factor = 0.9
    prediction = ModelType.FLOW
    base_model: ClassVar[Any] = wan_model.WAN21
    image_to_video = False

    def __init__(self, unet_config: dict[str, Any]) -> None:
        super().__init__(unet_config)
        width = self.unet_config.get("dim", USUAL_WIDTH)
        self.memory_usage_factor = width / WIDTH_OF_FACTOR_ONE

    def get_model(
        self, state_dict: StateDict, prefix: str = "", device: torch.device | str | None = None
    ) -> BaseModel:
        """The base model of this kind."""
        del state_dict, prefix
        return self.base_model(self, image_to_video=self.image_to_video, device=device)

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """UMT5-XXL."""
        return ClipTarget(WanT5Tokenizer, wan_clip(t5_dtype(state_dict)))


class WAN22_T2V(WAN21_T2V):
    """Wan 2.2 text and picture to video, 5B."""

    unet_config = {**WAN21_T2V.unet_config, "out_dim": 48}
    latent_format = latent_formats.Wan22
    base_model = wan_model.WAN22
    image_to_video = True


class WAN21_I2V(WAN21_T2V):
    """Wan 2.1 picture to video."""

    unet_config = {"image_model": "wan2.1", "model_type": "i2v", "in_dim": 36}
    image_to_video = True


class WAN21_FunControl2V(WAN21_T2V):
    """Wan 2.1 Fun Control."""

    unet_config = {"image_model": "wan2.1", "model_type": "i2v", "in_dim": 48}


class WAN21_Vace(WAN21_T2V):
    """Wan 2.1 VACE."""

    unet_config = {"image_model": "wan2.1", "model_type": "vace"}
    base_model = wan_model.WAN21_Vace

    def __init__(self, unet_config: dict[str, Any]) -> None:
        super().__init__(unet_config)
        self.memory_usage_factor *= 1.2  # the blocks over control videos


class WAN21_Camera(WAN21_T2V):
    """Wan 2.1 Fun Camera."""

    unet_config = {"image_model": "wan2.1", "model_type": "camera", "in_dim": 32}
    base_model = wan_model.WAN21_Camera
    image_to_video = True


class WAN22_Camera(WAN21_T2V):
    """Wan 2.2 Fun Camera."""

    unet_config = {"image_model": "wan2.1", "model_type": "camera_2.2", "in_dim": 36}
    base_model = wan_model.WAN21_Camera
    image_to_video = True


class WAN22_S2V(WAN21_T2V):
    """Wan 2.2 S2V."""

    unet_config = {"image_model": "wan2.1", "model_type": "s2v"}
    base_model = wan_model.WAN22_S2V


class WAN21_HuMo(WAN21_T2V):
    """HuMo."""

    unet_config = {"image_model": "wan2.1", "model_type": "humo"}
    base_model = wan_model.WAN21_HuMo
    image_to_video = True


class WAN22_Animate(WAN21_T2V):
    """Wan 2.2 Animate."""

    unet_config = {"image_model": "wan2.1", "model_type": "animate"}
    base_model = wan_model.WAN22_Animate
