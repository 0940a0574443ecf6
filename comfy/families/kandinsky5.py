"""Kandinsky 5: text (and a first picture) to video, and text to picture, conditioned on Qwen 2.5 VL
and CLIP ViT-L.
"""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from comfy import conds, latent_formats, resize
from comfy.families.base import BaseModel
from comfy.families.dit_layout import Shapes
from comfy.families.family import (
    BrokenModelError,
    ClipTarget,
    StateDict,
    TransformerFamily,
)
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import llm_dtype
from comfy.ldm.kandinsky5.model import Kandinsky5 as Kandinsky5Network
from comfy.text_encoders.kandinsky5 import (
    Kandinsky5Tokenizer,
    Kandinsky5TokenizerImage,
    kandinsky5_clip,
)

MARK = "visual_transformer_blocks.0.cross_attention.key_norm.weight"
CELL = 4  # latent cells of a token
USUAL_SIZES = {"in_text_dim": 3584, "in_text_dim2": 768, "out_visual_dim": 16}
UNKNOWN = 0.5  # of frames that a mask says nothing of
PICTURE_SCALES = [1.0, 1.0, 1.0]  # of positions, in networks of pictures


def read_kandinsky5_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the Kandinsky 5 network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing or
            impossible.
    """
    if prefix + MARK not in state_dict:
        return None
    shapes = Shapes(state_dict, prefix, "Kandinsky 5")
    width = shapes["visual_embeddings.in_layer.bias"][0]
    cell = shapes["visual_embeddings.in_layer.weight"][1]
    head = shapes[MARK][0]
    made = shapes["out_layer.out_layer.weight"][0]
    if width % head or head % 16:
        raise BrokenModelError(
            f"{prefix}visual_embeddings.in_layer.bias has {width} channels in heads of {head} "
            f"({prefix}{MARK}); heads must divide them and have a multiple of 16 channels"
        )
    sizes = {
        "in_text_dim": shapes["text_embeddings.in_layer.weight"][1],
        "in_text_dim2": shapes["pooled_text_embeddings.in_layer.weight"][1],
        "out_visual_dim": made // CELL,
    }
    config: dict[str, Any] = {
        "image_model": "kandinsky5",
        "model_dim": width,
        "axes_dims": [head // 4, head * 3 // 8, head * 3 // 8],
        "time_dim": shapes["time_embeddings.in_layer.bias"][0],
        "ff_dim": shapes["visual_transformer_blocks.0.feed_forward.in_layer.weight"][0],
        "visual_embed_dim": cell,
        "num_text_blocks": shapes.count("text_transformer_blocks."),
        "num_visual_blocks": shapes.count("visual_transformer_blocks."),
        **{name: size for name, size in sizes.items() if size != USUAL_SIZES[name]},
    }
    if cell == made:  # nothing stands beside the latent
        config["rope_scale_factor"] = PICTURE_SCALES
    return config


class Kandinsky5Model(BaseModel):
    """Text and pooled text; beside the latent what is known of the frames, and a mask of them."""

    network = Kandinsky5Network
    usual_type = ModelType.FLOW

    def conditioning_widths(self) -> dict[str, int]:
        """Widths of the text tokens and of the pooled text."""
        config = {**USUAL_SIZES, **self.model_config.unet_config}
        return {"c_crossattn": int(config["in_text_dim"]), "y": int(config["in_text_dim2"])}

    def encode_adm(self, **kwargs: Any) -> Tensor | None:
        """Pooled text [B, D]; None where the conditioning has none."""
        return kwargs.get("pooled_output")

    def concat_cond(self, **kwargs: Any) -> Tensor | None:
        """Zeros for the frames, and 1 where they are given."""
        noise: Tensor = kwargs["noise"]
        mask = kwargs.get("concat_mask", kwargs.get("denoise_mask"))
        if mask is None:
            given = torch.zeros_like(noise[:, :1])
        else:
            size = (noise.shape[-1], noise.shape[-2])
            given = 1.0 - mask.mean(dim=1, keepdim=True).to(noise)
            given = resize.common_upscale(given, *size, "bilinear", "center")
            missing = max(0, noise.shape[2] - given.shape[2])
            given = functional.pad(given, (0, 0, 0, 0, 0, missing), value=UNKNOWN)
            given = resize.resize_to_batch_size(given, noise.shape[0])
        return torch.cat([torch.zeros_like(noise), given], dim=1)

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text tokens, not repeated to match others, and frames that replace the latent's."""
        made = super().extra_conds(**kwargs)
        if kwargs.get("cross_attn") is not None:
            made["c_crossattn"] = conds.CONDRegular(kwargs["cross_attn"])
        frames = kwargs.get("time_dim_replace")
        if frames is not None:
            made["time_dim_replace"] = conds.CONDRegular(self.process_latent_in(frames))
        return made


class Kandinsky5ImageModel(Kandinsky5Model):
    """Nothing stands beside the latent of a picture."""

    def concat_cond(self, **kwargs: Any) -> Tensor | None:
        """Nothing."""
        del kwargs
        return None


class Kandinsky5Image(TransformerFamily):
    """Kandinsky 5, text to picture."""

    unet_config: dict[str, Any] = {
        "image_model": "kandinsky5",
        "rope_scale_factor": PICTURE_SCALES,
    }
    read_config = staticmethod(read_kandinsky5_config)
    sampling_settings = {"shift": 3.0}
    latent_format: Any = latent_formats.Flux
    memory_usage_factor = 1.25
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    prediction = ModelType.FLOW
    base_model: ClassVar[Any] = Kandinsky5ImageModel

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Qwen 2.5 VL and CLIP ViT-L."""
        return ClipTarget(Kandinsky5TokenizerImage, kandinsky5_clip(llm_dtype(state_dict)))


class Kandinsky5(Kandinsky5Image):
    """Kandinsky 5, video."""

    unet_config = {"image_model": "kandinsky5"}
    sampling_settings = {"shift": 10.0}
    latent_format = latent_formats.HunyuanVideo
    base_model = Kandinsky5Model

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Qwen 2.5 VL and CLIP ViT-L."""
        return ClipTarget(Kandinsky5Tokenizer, kandinsky5_clip(llm_dtype(state_dict)))
