"""Text for Lumina-Image 2.0, and guidance as its sampler does it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from comfy_api.latest import io
from comfy_extras.declarations import text_input
from comfy_extras.extension import entrypoint_of
from comfy_extras.guidance import Facts, with_rule

# The two beginnings of texts that the model was taught with.
SYSTEM_PROMPTS = {
    "superior": "You are an assistant designed to generate superior images with the superior "
    "degree of image-text alignment based on textual prompts or user prompts.",
    "alignment": "You are an assistant designed to generate high-quality images with the highest "
    "degree of image-text alignment based on textual prompts.",
}
SEPARATOR = " <Prompt Start> "


class CLIPTextEncodeLumina2(io.ComfyNode):
    """Text to conditioning, after an opening that the model was trained with."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPTextEncodeLumina2",
            display_name="CLIP Text Encode for Lumina2",
            category="conditioning",
            inputs=[
                io.Combo.Input("system_prompt", options=list(SYSTEM_PROMPTS)),
                text_input("user_prompt"),
                io.Clip.Input("clip"),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, clip: Any, user_prompt: str, system_prompt: str) -> io.NodeOutput:
        text = SYSTEM_PROMPTS[system_prompt] + SEPARATOR + user_prompt
        return io.NodeOutput(clip.encode_from_tokens_scheduled(clip.tokenize(text)))


def renormed(facts: Facts, channels: int | None, cfg_trunc: float, renorm_cfg: float) -> Tensor:
    """Input minus the guided estimate.

    Args:
        channels: How many channels are guided (None: all); the others are those of the positive
            estimate.
        cfg_trunc: Noise level from which on the positive estimate is taken as it is.
        renorm_cfg: Greatest norm of an item's estimate, in norms of its positive one; 0 for any.
    """
    positive, negative = facts["cond_denoised"], facts["uncond_denoised"]
    channels = positive.shape[1] if channels is None else channels
    guided, rest = positive[:, :channels], positive[:, channels:]
    if float(facts["timestep"][0]) < cfg_trunc:
        base = negative[:, :channels]
        made = base + facts["cond_scale"] * (guided - base)
        if renorm_cfg > 0:
            axes = tuple(range(1, made.ndim))
            limit = torch.linalg.vector_norm(guided, dim=axes, keepdim=True) * renorm_cfg
            norm = torch.linalg.vector_norm(made, dim=axes, keepdim=True)
            made = torch.where(norm > limit, made * (limit / norm), made)
        guided = made
    return facts["input"] - torch.cat([guided, rest], dim=1)


class RenormCFG(io.ComfyNode):
    """Bounds the norm of the guided estimate by that of the positive one."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RenormCFG",
            category="advanced/model",
            inputs=[
                io.Model.Input("model"),
                io.Float.Input("cfg_trunc", default=100, min=0.0, max=100.0, step=0.01),
                io.Float.Input("renorm_cfg", default=1.0, min=0.0, max=100.0, step=0.01),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, cfg_trunc: float, renorm_cfg: float) -> io.NodeOutput:
        channels = getattr(model.model.diffusion_model, "in_channels", None)
        rule = partial(renormed, channels=channels, cfg_trunc=cfg_trunc, renorm_cfg=renorm_cfg)
        return io.NodeOutput(with_rule(model, rule))

    patch = execute


comfy_entrypoint = entrypoint_of(CLIPTextEncodeLumina2, RenormCFG)
