"""Cosmos 1: text to video, frames to video, conditioned on the first T5 XXL."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import latent_formats
from comfy.families.cosmos import MASKED_CHANNELS, CosmosModel
from comfy.families.dit_layout import Shapes
from comfy.families.family import (
    BrokenModelError,
    ClipTarget,
    StateDict,
    TransformerFamily,
)
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import t5_dtype
from comfy.ldm.cosmos.model import GeneralDIT
from comfy.text_encoders import t5_alone

LAYER = "blocks.block0.blocks."
MARK = f"{LAYER}0.block.attn.to_q.0.weight"
PATCH = 2
SMALL_WIDTH = 4096  # of the network with 7 billion weights; that with 14 is wider
# Of every published network, whatever its size.
CONSTANTS: dict[str, Any] = {
    "image_model": "cosmos", "patch_spatial": PATCH, "patch_temporal": 1,
    "block_config": "FA-CA-MLP", "concat_padding_mask": True, "pos_emb_cls": "rope3d",
    "pos_emb_learnable": False, "pos_emb_interpolation": "crop", "block_x_format": "THWBD",
    "affline_emb_norm": True, "use_adaln_lora": True, "extra_per_block_abs_pos_emb": True,
    "extra_per_block_abs_pos_emb_type": "learnable", "rope_t_extrapolation_ratio": 2.0,
}  # fmt: skip
EXTRA_RATIOS = {f"extra_{axis}_extrapolation_ratio": 2.0 for axis in "hwt"}


def read_cosmos_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """Configuration of the Cosmos 1 network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing or
            impossible.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "Cosmos 1")
    width, cell = shapes["x_embedder.proj.1.weight"]
    head = shapes[f"{LAYER}0.block.attn.to_q.1.weight"][0]
    if width % head:
        raise BrokenModelError(
            f"{prefix}x_embedder.proj.1.weight makes {width} channels, which heads of {head} "
            "channels do not divide"
        )
    is_small = width == SMALL_WIDTH
    return {
        **CONSTANTS,
        "max_img_h": shapes["extra_pos_embedder.pos_emb_h"][0] * PATCH,
        "max_img_w": shapes["extra_pos_embedder.pos_emb_w"][0] * PATCH,
        "max_frames": shapes["extra_pos_embedder.pos_emb_t"][0],
        "in_channels": cell // PATCH**2 - 1,
        "out_channels": shapes["final_layer.linear.weight"][0] // PATCH**2,
        "model_channels": width,
        "num_blocks": shapes.count("blocks.block"),
        "num_heads": width // head,
        "mlp_ratio": shapes[f"{LAYER}2.block.layer1.weight"][0] / width,
        "crossattn_emb_channels": shapes[f"{LAYER}1.block.attn.to_k.0.weight"][1],
        "adaln_lora_dim": shapes[f"{LAYER}0.adaLN_modulation.1.weight"][0],
        "rope_h_extrapolation_ratio": 1.0 if is_small else 2.0,
        "rope_w_extrapolation_ratio": 1.0 if is_small else 2.0,
        **({} if is_small else EXTRA_RATIOS),
    }


class CosmosVideoModel(CosmosModel):
    """Given frames are never noised."""

    network = GeneralDIT
    usual_type = ModelType.EDM

    def scale_latent_inpaint(
        self, sigma: Tensor, noise: Tensor, latent_image: Tensor, **kwargs: Any
    ) -> Tensor:
        """Scaled so that the network finds given frames as it would without any noise."""
        del kwargs
        per_item = sigma.reshape([sigma.shape[0]] + [1] * (noise.ndim - 1))
        deviation = self.model_sampling.sigma_data
        return latent_image / deviation * (per_item**2 + deviation**2).sqrt()


class CosmosT2V(TransformerFamily):
    """Cosmos 1, text to video."""

    unet_config: dict[str, Any] = {"image_model": "cosmos", "in_channels": 16}
    read_config = staticmethod(read_cosmos_config)
    sampling_settings = {"sigma_data": 0.5, "sigma_max": 80.0, "sigma_min": 0.002}
    latent_format: Any = latent_formats.Cosmos1CV8x8x8
    memory_usage_factor = 1.6
    supported_inference_dtypes = [torch.bfloat16, torch.float16, torch.float32]
    prediction = ModelType.EDM
    base_model = CosmosVideoModel

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """The first T5 XXL."""
        return ClipTarget(
            t5_alone.t5_alone_tokenizer(t5_alone.COSMOS),
            t5_alone.t5_alone_clip(t5_alone.COSMOS, t5_dtype(state_dict)),
        )


class CosmosI2V(CosmosT2V):
    """Cosmos 1, frames to video."""

    unet_config = {"image_model": "cosmos", "in_channels": MASKED_CHANNELS}
