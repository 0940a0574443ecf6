"""Hunyuan3D 2 and 2 mini (also multi-view and turbo): shapes, conditioned on a picture's states."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import conds, latent_formats
from comfy.families.base import BaseModel
from comfy.families.dit_layout import FLUX_MARK, Shapes
from comfy.families.family import BrokenModelError, ModelFamily
from comfy.families.model_type import ModelType
from comfy.ldm.hunyuan3d.model import Hunyuan3Dv2 as Network

MARK = "latent_in.weight"
USUAL_GUIDANCE = 5.0  # where the conditioning says nothing


def read_hunyuan3d_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the Hunyuan3D 2 network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing or
            impossible.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "Hunyuan3D 2")
    width, channels = shapes[MARK]
    head = shapes[FLUX_MARK][0]
    if width % head:
        raise BrokenModelError(
            f"{prefix}{MARK} makes {width} channels, which heads of {head} channels "
            f"({prefix}{FLUX_MARK}) do not divide"
        )
    return {
        "image_model": "hunyuan3d2",
        "in_channels": channels,
        "context_in_dim": shapes["cond_in.weight"][1],
        "hidden_size": width,
        "mlp_ratio": shapes["double_blocks.0.img_mlp.0.weight"][0] / width,
        "num_heads": width // head,
        "depth": shapes.count("double_blocks."),
        "depth_single_blocks": shapes.count("single_blocks."),
        "qkv_bias": True,
        "guidance_embed": "guidance_in.in_layer.weight" in shapes,
    }


class Hunyuan3DModel(BaseModel):
    """A picture's states and a guidance strength."""

    def __init__(
        self,
        model_config: ModelFamily,
        model_type: ModelType | None = ModelType.FLOW,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(model_config, model_type, device=device, unet_model=Network)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """States of a picture [B, L, D], not repeated to match others; the strength."""
        made = super().extra_conds(**kwargs)
        states = kwargs.get("cross_attn")
        if states is not None:
            made["c_crossattn"] = conds.CONDRegular(states)
        guidance = kwargs.get("guidance", USUAL_GUIDANCE)
        if guidance is not None:
            made["guidance"] = conds.CONDRegular(torch.tensor([float(guidance)]))
        return made


class Hunyuan3Dv2(ModelFamily):
    """Hunyuan3D 2."""

    unet_config: dict[str, Any] = {"image_model": "hunyuan3d2"}
    read_config = staticmethod(read_hunyuan3d_config)
    latent_format: Any = latent_formats.Hunyuan3Dv2
    memory_usage_factor = 3.5
    sampling_settings = {"multiplier": 1.0, "shift": 1.0}
    prediction = ModelType.FLOW
    base_model = Hunyuan3DModel
    vae_key_prefix = ["vae."]
    clip_vision_prefix = "conditioner.main_image_encoder.model."


class Hunyuan3Dv2mini(Hunyuan3Dv2):
    """Hunyuan3D 2 mini."""

    unet_config = {**Hunyuan3Dv2.unet_config, "depth": 8}
    latent_format = latent_formats.Hunyuan3Dv2mini
