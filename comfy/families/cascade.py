"""Stable Cascade: stage C makes a small latent from text and pictures, stage B a picture's latent
from that.
"""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from comfy import conds, latent_formats
from comfy.families.base import BaseModel
from comfy.families.dit_layout import Shapes
from comfy.families.family import ClipTarget, ModelFamily, StateDict
from comfy.families.model_type import ModelType
from comfy.ldm.cascade.stage_b import KINDS, StageB
from comfy.ldm.cascade.stage_c import StageC
from comfy.text_encoders.sdxl import StableCascadeClipModel, StableCascadeTokenizer

END_MARK, STAGE_C_MARK, STAGE_B_MARK = (
    "clf.1.weight",
    "clip_txt_mapper.weight",
    "clip_mapper.weight",
)
HEAD = 64  # channels of a head in every published network
WITHOUT_ATTENTION = -1
STAGE_C_KINDS = "CTA"
C_PATCH, B_PATCH = 1, 2
USUAL_C: dict[str, Any] = {
    "c_in": 16, "c_out": 16, "c_r": 64, "c_hidden": [2048, 2048], "nhead": [32, 32],
    "blocks": [[8, 24], [24, 8]], "block_repeat": [[1, 1], [1, 1]], "c_clip_text": 1280,
    "c_clip_text_pooled": 1280, "c_clip_img": 768, "c_clip_seq": 4,
}  # fmt: skip
USUAL_B: dict[str, Any] = {
    "c_in": 4, "c_out": 4, "c_r": 64, "c_cond": 1280, "c_clip": 1280, "c_clip_seq": 4,
    "c_effnet": 16,
}  # fmt: skip
# Pixels of a cell of stage B and, at least, of stage C.
B_CELL, C_CELL = 4, 42
JOINED = (".attn.in_proj_weight", ".attn.in_proj_bias")
APART = ("to_q", "to_k", "to_v")


def _levels(shapes: Shapes, kinds: list[str]) -> dict[str, Any]:
    """Widths, heads and counts of blocks of each level."""
    count, up = len(kinds), kinds[::-1]
    widths = [shapes[f"down_blocks.{n}.0.depthwise.weight"][0] for n in range(count)]

    def groups(way: str, letters: list[str]) -> list[int]:
        return [shapes.count(f"{way}_blocks.{n}.") // len(kind) for n, kind in enumerate(letters)]

    def repeats(way: str) -> list[int]:
        return [shapes.count(f"{way}_repeat_mappers.{n}.") + 1 for n in range(count)]

    return {
        "c_hidden": widths,
        "nhead": [
            max(1, width // HEAD) if "A" in kind else WITHOUT_ATTENTION
            for width, kind in zip(widths, kinds)
        ],
        "blocks": [groups("down", kinds), groups("up", up)],
        "block_repeat": [repeats("down"), repeats("up")],
    }


def _unusual(sizes: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {name: size for name, size in sizes.items() if usual.get(name) != size}


def read_cascade_config(
    state_dict: Mapping[str, Tensor], prefix: str = ""
) -> dict[str, Any] | None:
    """Configuration of the network of stage C or B whose keys start with `prefix`, or None.

    Raises:
        BrokenModelError: The layout fits, but a weight that decides a size is missing.
    """
    if prefix + END_MARK not in state_dict:
        return None
    if prefix + STAGE_C_MARK in state_dict:
        return _read_stage_c(Shapes(state_dict, prefix, "Stable Cascade, stage C"))
    if prefix + STAGE_B_MARK in state_dict:
        return _read_stage_b(Shapes(state_dict, prefix, "Stable Cascade, stage B"))
    return None


def _read_stage_c(shapes: Shapes) -> dict[str, Any]:
    width, text_width = shapes[STAGE_C_MARK]
    tokens, pooled_width = shapes["clip_txt_pooled_mapper.weight"]
    sizes = {
        "c_in": shapes["embedding.1.weight"][1] // C_PATCH**2,
        "c_out": shapes[END_MARK][0] // C_PATCH**2,
        "c_r": shapes["down_blocks.0.1.mapper.weight"][1],
        **_levels(shapes, [STAGE_C_KINDS] * shapes.count("down_blocks.")),
        "c_clip_text": text_width,
        "c_clip_text_pooled": pooled_width,
        "c_clip_img": shapes["clip_img_mapper.weight"][1],
        "c_clip_seq": tokens // width,
    }
    return {"stable_cascade_stage": "c", "c_cond": width, **_unusual(sizes, USUAL_C)}


def _read_stage_b(shapes: Shapes) -> dict[str, Any]:
    tokens, pooled_width = shapes[STAGE_B_MARK]
    width = shapes["down_blocks.2.2.kv_mapper.1.weight"][1]
    sizes = {
        "c_in": shapes["embedding.1.weight"][1] // B_PATCH**2,
        "c_out": shapes[END_MARK][0] // B_PATCH**2,
        "c_r": shapes["down_blocks.0.1.mapper.weight"][1],
        "c_cond": width,
        "c_clip": pooled_width,
        "c_clip_seq": tokens // width,
        "c_effnet": shapes["effnet_mapper.0.weight"][1],
    }
    levels = _levels(shapes, list(KINDS))
    return {"stable_cascade_stage": "b", **levels, **_unusual(sizes, USUAL_B)}


class StableCascade_C(BaseModel):
    """Stage C: text, pooled text and pictures."""

    network = StageC
    usual_type = ModelType.STABLE_CASCADE

    def conditioning_widths(self) -> dict[str, int]:
        """Widths of the text tokens and of the pooled text."""
        config = {**USUAL_C, **self.model_config.unet_config}
        return {
            "clip_text": int(config["c_clip_text"]),
            "clip_text_pooled": int(config["c_clip_text_pooled"]),
        }

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Text, pooled text, embeddings of pictures by strength (zeros without any)."""
        made: dict[str, Any] = {}
        pooled = kwargs.get("pooled_output")
        if pooled is None:
            raise ValueError(
                "Stable Cascade needs the pooled output of its text encoder, and the conditioning "
                "has none; encode the text with the text encoder of Stable Cascade"
            )
        made["clip_text_pooled"] = conds.CONDRegular(pooled)
        pictures = [
            one["clip_vision_output"].image_embeds[None] * one["strength"]
            for one in kwargs.get("unclip_conditioning") or ()
        ]
        width = {**USUAL_C, **self.model_config.unet_config}["c_clip_img"]
        seen = torch.cat(pictures, dim=1) if pictures else torch.zeros(1, 1, width)
        made["clip_img"] = conds.CONDRegular(seen)
        made["sca"] = conds.CONDRegular(torch.zeros(1))
        made["crp"] = conds.CONDRegular(torch.zeros(1))
        if kwargs.get("cross_attn") is not None:
            made["clip_text"] = conds.CONDCrossAttn(kwargs["cross_attn"])
        return made


class StableCascade_B(BaseModel):
    """Stage B: the latent of stage C and pooled text."""

    network = StageB
    usual_type = ModelType.STABLE_CASCADE

    def conditioning_widths(self) -> dict[str, int]:
        """Width of the pooled text."""
        return {"clip": int({**USUAL_B, **self.model_config.unet_config}["c_clip"])}

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """Pooled text, and the latent of stage C (zeros without one)."""
        made: dict[str, Any] = {}
        pooled = kwargs.get("pooled_output")
        if pooled is not None:
            made["clip"] = conds.CONDRegular(pooled)
        noise: Tensor = kwargs["noise"]
        prior = kwargs.get("stable_cascade_prior")
        if prior is None:
            channels = {**USUAL_B, **self.model_config.unet_config}["c_effnet"]
            sides = (max(1, size * B_CELL // C_CELL) for size in noise.shape[-2:])
            prior = torch.zeros(1, channels, *sides)
        made["effnet"] = conds.CONDRegular(prior.to(noise))
        made["sca"] = conds.CONDRegular(torch.zeros(1))
        return made


class Stable_Cascade_C(ModelFamily):
    """Stable Cascade, stage C."""

    unet_config: dict[str, Any] = {"stable_cascade_stage": "c"}
    read_config = staticmethod(read_cascade_config)
    sampling_settings = {"shift": 2.0}
    latent_format: Any = latent_formats.SC_Prior
    supported_inference_dtypes = [torch.bfloat16, torch.float32]
    vae_key_prefix = ["vae."]
    text_encoder_key_prefix = ["text_encoder."]
    clip_vision_prefix: str | None = "clip_l_vision."
    prediction = ModelType.STABLE_CASCADE
    base_model: ClassVar[Any] = StableCascade_C

    def process_unet_state_dict(self, state_dict: StateDict) -> StateDict:
        """Queries, keys and values of some files are one weight."""
        weights = dict(state_dict)
        for key in state_dict:
            ending = next((end for end in JOINED if key.endswith(end)), None)
            if ending is None:
                continue
            kind = ending.rpartition("_")[2]
            root = key.removesuffix(ending)
            for name, part in zip(APART, weights.pop(key).chunk(len(APART))):
                weights[f"{root}.attn.{name}.{kind}"] = part
        return weights

    def process_clip_state_dict(self, state_dict: StateDict) -> StateDict:
        """The projection stands the other way round, under another name."""
        weights = super().process_clip_state_dict(state_dict)
        projection = weights.pop("clip_g.text_projection", None)
        if projection is not None:
            turned = projection.transpose(0, 1).contiguous()
            weights["clip_g.transformer.text_projection.weight"] = turned
        return weights

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """CLIP bigG."""
        del state_dict
        return ClipTarget(StableCascadeTokenizer, StableCascadeClipModel)


class Stable_Cascade_B(Stable_Cascade_C):
    """Stable Cascade, stage B."""

    unet_config = {"stable_cascade_stage": "b"}
    sampling_settings = {"shift": 1.0}
    latent_format = latent_formats.SC_B
    supported_inference_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    clip_vision_prefix = None
    base_model = StableCascade_B
