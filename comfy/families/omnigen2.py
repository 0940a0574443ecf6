"""OmniGen 2: text and pictures to picture, conditioned on Qwen 2.5 3B."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy import conds, latent_formats
from comfy.families.dit_layout import Shapes
from comfy.families.family import ClipTarget, StateDict, TransformerFamily
from comfy.families.model_type import ModelType
from comfy.families.qwen_image import Lumina2Model
from comfy.families.references import reference_shapes, shown_latents
from comfy.families.text_sizes import llm_dtype
from comfy.ldm.omnigen.omnigen2 import FEED_FORWARD, OmniGen2Transformer2DModel
from comfy.text_encoders.omnigen2 import Omnigen2Tokenizer, omnigen2_clip

MARK = "time_caption_embed.timestep_embedder.linear_1.bias"
PATCH = 2
INNER_MULTIPLE = 256


def read_omnigen2_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the OmniGen 2 network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "OmniGen 2")
    width, cell = shapes["x_embedder.weight"]
    head = shapes["layers.0.attn.norm_q.weight"][0]
    inner = shapes["layers.0.feed_forward.linear_1.weight"][0]
    made = shapes["norm_out.linear_2.weight"][0]
    side = head // 6 * 2
    config: dict[str, Any] = {
        "image_model": "omnigen2",
        "patch_size": PATCH,
        "in_channels": cell // PATCH**2,
        "out_channels": None if made == cell else made // PATCH**2,
        "hidden_size": width,
        "num_layers": shapes.count("layers."),
        "num_refiner_layers": shapes.count("noise_refiner."),
        "num_attention_heads": width // head,
        "num_kv_heads": shapes["layers.0.attn.to_k.weight"][0] // head,
        "multiple_of": INNER_MULTIPLE,
        "ffn_dim_multiplier": None,
        "norm_eps": 1e-5,
        "axes_dim_rope": [head - 2 * side, side, side],
        "axes_lens": [1024, 1664, 1664],
        "text_feat_dim": shapes["time_caption_embed.caption_embedder.1.weight"][1],
        "timestep_scale": 1000.0,
    }
    if inner != -(-FEED_FORWARD * width // INNER_MULTIPLE) * INNER_MULTIPLE:
        config.update(ffn_dim_multiplier=inner / (FEED_FORWARD * width), multiple_of=1)
    return config


class Omnigen2Model(Lumina2Model):
    """Text with the number of its tokens, and pictures to look at."""

    network = OmniGen2Transformer2DModel
    usual_type = ModelType.FLOW
    memory_usage_factor_conds = ("ref_latents",)
    text_width = "text_feat_dim"

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text as of Lumina 2, and reference latents."""
        made = super().extra_conds(**kwargs)
        references = kwargs.get("reference_latents")
        if references is not None:
            made["ref_latents"] = conds.CONDList(shown_latents(self, references))
        return made

    def extra_conds_shapes(self, **kwargs: Any) -> dict[str, list[int]]:
        """Those of the reference latents."""
        return reference_shapes(self, kwargs)


class Omnigen2(TransformerFamily):
    """OmniGen 2."""

    unet_config: dict[str, Any] = {"image_model": "omnigen2"}
    read_config = staticmethod(read_omnigen2_config)
    sampling_settings = {"multiplier": 1.0, "shift": 2.6}
    latent_format: Any = latent_formats.Flux
    memory_usage_factor = 1.95
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    prediction = ModelType.FLOW
    base_model = Omnigen2Model

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Qwen 2.5 3B."""
        return ClipTarget(Omnigen2Tokenizer, omnigen2_clip(llm_dtype(state_dict)))
