"""PixArt alpha and sigma: a transformer over pictures, conditioned on T5-XXL alone."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import conds, latent_formats
from comfy.families.base import BaseModel
from comfy.families.dit_layout import Shapes
from comfy.families.family import (
    BrokenModelError,
    ClipTarget,
    StateDict,
    TransformerFamily,
)
from comfy.families.text_sizes import t5_dtype
from comfy.ldm.pixart.pixartms import PixArtMS
from comfy.text_encoders import t5_alone

MARK = "t_block.1.weight"
RELATIVE = "genre_embedder.weight"  # of ACE-Step, which has the mark too
HEAD = 72  # channels of a head in every published network
USUAL_TEXT = 4096
BASE_PATCHES = 64  # per side of the pictures whose positions are not spread


def read_pixart_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """Configuration of the PixArt network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing or
            impossible.
    """
    if prefix + MARK not in state_dict or prefix + RELATIVE in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "PixArt")
    width, channels, patch, _ = shapes["x_embedder.proj.weight"]
    if width % HEAD:
        raise BrokenModelError(
            f"{prefix}x_embedder.proj.weight makes {width} channels, which heads of {HEAD} "
            "channels do not divide"
        )
    is_alpha = "ar_embedder.mlp.0.weight" in shapes
    text_width = shapes["y_embedder.y_proj.fc1.weight"][1]
    config: dict[str, Any] = {
        "image_model": "pixart_alpha" if is_alpha else "pixart_sigma",
        "num_heads": width // HEAD,
        "patch_size": patch,
        "hidden_size": width,
        "in_channels": channels,
        "depth": shapes.count("blocks."),
        "mlp_ratio": shapes["blocks.0.mlp.fc1.weight"][0] / width,
        "micro_condition": is_alpha,
    }
    if "y_embedder.y_embedding" in shapes:
        config["model_max_length"] = shapes["y_embedder.y_embedding"][0]
    if "pos_embed" in shapes:
        config["input_size"] = math.isqrt(shapes["pos_embed"][1]) * patch
        config["pe_interpolation"] = config["input_size"] // BASE_PATCHES
    if text_width != USUAL_TEXT:
        config["caption_channels"] = text_width
    return config


class PixArtModel(BaseModel):
    """Text, and where it is told the size of the picture."""

    network = PixArtMS

    def conditioning_widths(self) -> dict[str, int]:
        """Width of the text tokens."""
        width = self.model_config.unet_config.get("caption_channels", USUAL_TEXT)
        return {"c_crossattn": int(width)}

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text tokens, not repeated to match others; height and width, and their ratio."""
        made = super().extra_conds(**kwargs)
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDRegular(kwargs["cross_attn"])
        width, height = kwargs.get("width"), kwargs.get("height")
        if width is not None and height is not None:
            made["c_size"] = conds.CONDRegular(torch.tensor([[float(height), float(width)]]))
            made["c_ar"] = conds.CONDRegular(torch.tensor([[height / width]]))
        return made


class PixArtAlpha(TransformerFamily):
    """PixArt alpha."""

    unet_config: dict[str, Any] = {"image_model": "pixart_alpha"}
    read_config = staticmethod(read_pixart_config)
    sampling_settings = {
        "beta_schedule": "sqrt_linear",
        "linear_start": 0.0001,
        "linear_end": 0.02,
        "timesteps": 1000,
    }
    latent_format: Any = latent_formats.SD15
    memory_usage_factor = 0.5
    base_model = PixArtModel

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """T5-XXL."""
        return ClipTarget(
            t5_alone.t5_alone_tokenizer(t5_alone.PIXART),
            t5_alone.t5_alone_clip(t5_alone.PIXART, t5_dtype(state_dict)),
        )


class PixArtSigma(PixArtAlpha):
    """PixArt sigma."""

    unet_config = {"image_model": "pixart_sigma"}
    latent_format = latent_formats.SDXL
