"""HiDream: text (and a picture to change) to picture, conditioned on four text encoders."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import conds, latent_formats, resize
from comfy.families.base import BaseModel
from comfy.families.dit_layout import Shapes
from comfy.families.family import BrokenModelError, TransformerFamily
from comfy.families.model_type import ModelType
from comfy.ldm.hidream.layers import inner_width
from comfy.ldm.hidream.model import FEED_FORWARD, HiDreamImageTransformer2DModel

MARK = "caption_projection.0.linear.weight"
HEAD = 128  # channels of a head in every published network
PATCH = 2
CHOSEN_EXPERTS = 2
LAST_LAYER = 31  # of Llama; the layers past as many here look at it, too


def read_hidream_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the HiDream network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing or
            impossible.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "HiDream")
    width, cell = shapes["x_embedder.proj.weight"]
    head = math.gcd(HEAD, width)
    if head % 8:
        raise BrokenModelError(
            f"{prefix}x_embedder.proj.weight makes {width} channels, of which heads would have "
            f"{head}; positions need a multiple of 8"
        )
    doubles, singles = (shapes.count(f"{kind}_stream_blocks.") for kind in ("double", "single"))
    layers = doubles + singles
    block = "double_stream_blocks.0.block."
    experts = shapes[f"{block}ff_i.gate.weight"][0]
    inner = shapes[f"{block}ff_i.experts.0.w1.weight"][0]
    shared = shapes[f"{block}ff_i.shared_experts.w1.weight"][0]
    config: dict[str, Any] = {
        "image_model": "hidream",
        "attention_head_dim": head,
        "axes_dims_rope": [head // 2, head // 4, head // 4],
        "caption_channels": [
            shapes[f"caption_projection.{layers}.linear.weight"][1],
            shapes[MARK][1],
        ],
        "max_resolution": [128, 128],
        "in_channels": cell // PATCH**2,
        "llama_layers": [min(number, LAST_LAYER) for number in range(layers)],
        "num_attention_heads": width // head,
        "num_routed_experts": experts,
        "num_activated_experts": min(CHOSEN_EXPERTS, experts),
        "num_layers": doubles,
        "num_single_layers": singles,
        "out_channels": shapes["final_layer.linear.weight"][0] // PATCH**2,
        "patch_size": PATCH,
        "text_emb_dim": shapes["p_embedder.pooled_embedder.linear_1.weight"][1],
    }
    if inner != inner_width(FEED_FORWARD * width):
        config["ff_dim"] = inner
    if shared != inner_width(FEED_FORWARD * width // 2):
        config["shared_ff_dim"] = shared
    return config


class HiDreamModel(BaseModel):
    """Pooled text, states of two encoders, and the picture to change."""

    network = HiDreamImageTransformer2DModel
    usual_type = ModelType.FLOW

    def conditioning_widths(self) -> dict[str, int]:
        """Widths of T5's states and of the pooled text."""
        config = self.model_config.unet_config
        if "caption_channels" not in config:
            return {}
        return {"c_crossattn": int(config["caption_channels"][0]), "y": int(config["text_emb_dim"])}

    def encode_adm(self, **kwargs: Any) -> Tensor | None:
        """Pooled text [B, D]; None where the conditioning has none."""
        return kwargs.get("pooled_output")

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """States, not repeated to match others, and the latent of a picture."""
        made = super().extra_conds(**kwargs)
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDRegular(kwargs["cross_attn"])
        layers = kwargs.get("conditioning_llama3")
        if layers is not None:
            made["encoder_hidden_states_llama3"] = conds.CONDRegular(layers)
        image, noise = kwargs.get("concat_latent_image"), kwargs["noise"]
        if image is not None:
            if image.shape[-2:] != noise.shape[-2:]:
                size = (noise.shape[-1], noise.shape[-2])
                image = resize.common_upscale(image, *size, "bilinear", "center")
            made["image_cond"] = conds.CONDNoiseShape(self.process_latent_in(image))
        return made


class HiDream(TransformerFamily):
    """HiDream."""

    unet_config: dict[str, Any] = {"image_model": "hidream"}
    read_config = staticmethod(read_hidream_config)
    latent_format: Any = latent_formats.Flux
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    prediction = ModelType.FLOW
    base_model = HiDreamModel
