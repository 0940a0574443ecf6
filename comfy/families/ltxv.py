"""LTX video: text and picture to video, conditioned on T5-XXL."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from comfy import conds, latent_formats
from comfy.families.base import BaseModel
from comfy.families.dit_layout import Shapes
from comfy.families.family import (
    BrokenModelError,
    ClipTarget,
    StateDict,
    TransformerFamily,
)
from comfy.families.model_type import ModelType
from comfy.families.text_sizes import t5_dtype
from comfy.ldm.lightricks.model import USUAL_FRAME_RATE, LTXVModel
from comfy.text_encoders import t5_alone
from comfy.weights.ltx_header import told_of

MARK = "adaln_single.emb.timestep_embedder.linear_1.bias"
# Keys of relatives that have the mark too and are other networks.
RELATIVES = ("audio_adaln_single.linear.weight", "pos_embed.proj.bias")
HEADS = 32  # of every published network
USUAL_WIDTH = 2048
USUAL_SIZES = {"in_channels": 128, "caption_channels": 4096}


def read_ltxv_config(state_dict: Mapping[str, Tensor], prefix: str = "") -> dict[str, Any] | None:
    """Configuration of the LTX video network whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing or
            impossible.
    """
    if prefix + MARK not in state_dict or any(prefix + key in state_dict for key in RELATIVES):
        return None
    shapes = Shapes(state_dict, prefix, "LTX video")
    width, text_width = shapes["transformer_blocks.0.attn2.to_k.weight"]
    if width % HEADS:
        raise BrokenModelError(
            f"{prefix}transformer_blocks.0.attn2.to_k.weight makes {width} channels, which "
            f"{HEADS} heads do not divide"
        )
    sizes = {
        "in_channels": shapes["patchify_proj.weight"][1],
        "caption_channels": shapes["caption_projection.linear_1.weight"][1],
    }
    return {
        "image_model": "ltxv",
        "num_layers": shapes.count("transformer_blocks."),
        "attention_head_dim": width // HEADS,
        "cross_attention_dim": text_width,
        **{name: size for name, size in sizes.items() if size != USUAL_SIZES[name]},
    }


def times_of_cells(timestep: Tensor, mask: Tensor | None) -> Tensor:
    """Time ``[B, N, 1]`` of each cell of a video ``[B, C, T, H, W]``, 0 where its mask is; all
    have the same ``[B]`` without one.
    """
    if mask is None:
        return timestep
    times = mask[:, :1] * timestep.reshape(-1, *[1] * (mask.ndim - 1))
    return times.flatten(2).transpose(1, 2)


class LTXVideoModel(BaseModel):
    """Text, the rate of frames, given frames at time 0, guides at places of their own."""

    network: ClassVar[type[nn.Module]] = LTXVModel
    usual_type = ModelType.FLUX

    def conditioning_widths(self) -> dict[str, int]:
        """Width of the text tokens."""
        usual = USUAL_SIZES["caption_channels"]
        return {"c_crossattn": self.model_config.unet_config.get("caption_channels", usual)}

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text and its mask, the rate, what is to be made, places of guides."""
        made = super().extra_conds(**kwargs)
        regular = {
            "c_crossattn": kwargs.get("cross_attn"),
            "attention_mask": kwargs.get("attention_mask"),
            "keyframe_idxs": kwargs.get("keyframe_idxs"),
        }
        made.update({k: conds.CONDRegular(v) for k, v in regular.items() if v is not None})
        mask = kwargs.get("concat_mask", kwargs.get("denoise_mask"))
        if mask is not None:
            made["denoise_mask"] = conds.CONDCells(mask)
        made["frame_rate"] = conds.CONDConstant(kwargs.get("frame_rate", USUAL_FRAME_RATE))
        return made

    def process_timestep(self, timestep: Tensor, **kwargs: Any) -> Any:
        """Time [B, N, 1] of each cell: 0 where it is given."""
        return times_of_cells(timestep, kwargs.get("denoise_mask"))

    def scale_latent_inpaint(
        self, sigma: Tensor, noise: Tensor, latent_image: Tensor, **kwargs: Any
    ) -> Tensor:
        """Given cells are never noised."""
        del sigma, noise, kwargs
        return latent_image


class LTXV(TransformerFamily):
    """LTX video."""

    unet_config: dict[str, Any] = {"image_model": "ltxv"}
    read_config = staticmethod(read_ltxv_config)
    sampling_settings = {"shift": 2.37}
    latent_format: Any = latent_formats.LTXV
    memory_usage_factor = 5.5
    prediction = ModelType.FLUX
    base_model = LTXVideoModel
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    # Settings of the network that no shape tells -> what their values are.
    told_by_header: ClassVar[dict[str, type | tuple[type, ...]]] = {
        "causal_temporal_positioning": bool,  # how the first frame counts in places
    }

    def __init__(self, unet_config: dict[str, Any]) -> None:
        super().__init__(unet_config)
        width = self.unet_config.get("cross_attention_dim", USUAL_WIDTH)
        self.memory_usage_factor = self.memory_usage_factor * width / USUAL_WIDTH

    def read_header(self, metadata: Mapping[str, str] | None) -> None:
        """Takes what only the header of a file tells of the network."""
        told = told_of(metadata, "transformer")
        for name, kinds in self.told_by_header.items():
            value = told.get(name)
            if isinstance(value, kinds):
                self.unet_config[name] = value

    def header(self) -> dict[str, str]:
        """What a header told."""
        told = {n: self.unet_config[n] for n in self.told_by_header if n in self.unet_config}
        return {"config": json.dumps({"transformer": told})} if told else {}

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """T5-XXL."""
        return ClipTarget(
            t5_alone.t5_alone_tokenizer(t5_alone.LTXV),
            t5_alone.t5_alone_clip(t5_alone.LTXV, t5_dtype(state_dict)),
        )
