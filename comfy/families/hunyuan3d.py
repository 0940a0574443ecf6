"""Hunyuan3D 2, 2 mini (also multi-view and turbo) and 2.1: shapes, conditioned on a picture's
states.
"""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comfy import conds, latent_formats
from comfy.families.base import BaseModel
from comfy.families.dit_layout import FLUX_MARK, Shapes
from comfy.families.family import BrokenModelError, ModelFamily
from comfy.families.model_type import ModelType
from comfy.ldm.hunyuan3d.model import Hunyuan3Dv2 as Network
from comfy.ldm.hunyuan3dv2_1.hunyuandit import HunYuanDiTPlain

MARK = "latent_in.weight"
PLAIN_HEAD = "blocks.0.attn1.q_norm.weight"
PLAIN_MARKS = ("t_embedder.mlp.2.weight", "blocks.0.attn1.to_q.weight", PLAIN_HEAD)  # of 2.1
EXPERTS = 8  # where no layer has any
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


def read_hunyuan3d21_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """As `read_hunyuan3d_config`, of Hunyuan3D 2.1."""
    if any(prefix + key not in state_dict for key in PLAIN_MARKS):
        return None
    shapes = Shapes(state_dict, prefix, "Hunyuan3D 2.1")
    width, channels = shapes["x_embedder.weight"]
    head = shapes[PLAIN_HEAD][0]
    if width % head or "t_embedder.cond_proj.weight" in shapes:
        raise BrokenModelError(
            f"{prefix}x_embedder.weight makes {width} channels in heads of {head} "
            f"({prefix}{PLAIN_HEAD}), which must divide them, and {prefix}t_embedder takes "
            "nothing but the time; this network does not fit"
        )
    depth = shapes.count("blocks.")
    gates = [f"blocks.{number}.moe.gate.weight" for number in range(depth)]
    gates = [gate for gate in gates if gate in shapes]
    return {
        "image_model": "hunyuan3d2_1",
        "in_channels": channels,
        "context_dim": shapes["blocks.0.attn2.to_k.weight"][1],
        "hidden_size": width,
        "mlp_ratio": shapes["t_embedder.mlp.0.weight"][0] / width,
        "num_heads": width // head,
        "depth": depth,
        "qkv_bias": "blocks.0.attn1.to_q.bias" in shapes,
        "num_moe_layers": len(gates),
        "num_experts": shapes[gates[0]][0] if gates else EXPERTS,
    }


class Hunyuan3DModel(BaseModel):
    """A picture's states and a guidance strength."""

    network: ClassVar[type[nn.Module]] = Network
    usual_type = ModelType.FLOW

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


class Hunyuan3D21Model(Hunyuan3DModel):
    """A picture's states; the strength has no effect here."""

    network = HunYuanDiTPlain


class Hunyuan3Dv2(ModelFamily):
    """Hunyuan3D 2."""

    unet_config: dict[str, Any] = {"image_model": "hunyuan3d2"}
    read_config = staticmethod(read_hunyuan3d_config)
    latent_format: Any = latent_formats.Hunyuan3Dv2
    memory_usage_factor = 3.5
    sampling_settings = {"multiplier": 1.0, "shift": 1.0}
    prediction = ModelType.FLOW
    base_model: ClassVar[Any] = Hunyuan3DModel
    vae_key_prefix = ["vae."]
    clip_vision_prefix = "conditioner.main_image_encoder.model."


class Hunyuan3Dv2mini(Hunyuan3Dv2):
    """Hunyuan3D 2 mini."""

    unet_config = {**Hunyuan3Dv2.unet_config, "depth": 8}
    latent_format = latent_formats.Hunyuan3Dv2mini


class Hunyuan3Dv2_1(Hunyuan3Dv2):
    """Hunyuan3D 2.1."""

    unet_config = {"image_model": "hunyuan3d2_1"}
    read_config = staticmethod(read_hunyuan3d21_config)
    latent_format = latent_formats.Hunyuan3Dv2_1
    base_model = Hunyuan3D21Model
