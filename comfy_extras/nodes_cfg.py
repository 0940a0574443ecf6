"""Guidance that keeps in check how long the guided estimate is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy_api.latest import ComfyExtension, io
from comfy_extras.guidance import Facts, patched_model_schema, with_post_cfg


def optimized_scale(positive: Tensor, negative: Tensor) -> Tensor:
    """Factor [B, 1, 1, ...] that brings `negative` closest to `positive`."""
    p, n = positive.flatten(1), negative.flatten(1)
    factor = (p * n).sum(1) / ((n * n).sum(1) + 1e-8)
    return factor.reshape([-1] + [1] * (positive.ndim - 1))


class CFGZeroStar(io.ComfyNode):
    """Scales the negative prediction to fit the positive one.

    Source: Fan et al. 2025, https://arxiv.org/abs/2503.18886.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return patched_model_schema("CFGZeroStar", "advanced/guidance")

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        def change(facts: Facts) -> Tensor:
            x, scale = facts["input"], facts["cond_scale"]
            positive, negative = facts["cond_denoised"], facts["uncond_denoised"]
            alpha = optimized_scale(x - positive, x - negative)
            return facts["denoised"] + negative * (alpha - 1.0) + scale * negative * (1.0 - alpha)

        return with_post_cfg(model, change)


class CFGNorm(io.ComfyNode):
    """Keeps the guided estimate from being longer than the positive one, pixel by pixel."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        strength = io.Float.Input("strength", default=1.0, min=0.0, max=100.0, step=0.01)
        return patched_model_schema("CFGNorm", "advanced/guidance", strength, is_experimental=True)

    @classmethod
    def execute(cls, model: Any, strength: float) -> io.NodeOutput:
        def change(facts: Facts) -> Tensor:
            guided = facts["denoised"]
            length = torch.linalg.vector_norm(facts["cond_denoised"], dim=1, keepdim=True)
            guided_length = torch.linalg.vector_norm(guided, dim=1, keepdim=True)
            scale = (length / (guided_length + 1e-8)).clamp(0.0, 1.0)
            return guided * scale * strength

        return with_post_cfg(model, change)


class CfgExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [CFGNorm, CFGZeroStar]


async def comfy_entrypoint() -> CfgExtension:
    """Called by the loader of built-in modules."""
    return CfgExtension()
