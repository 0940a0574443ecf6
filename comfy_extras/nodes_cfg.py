"""Guidance that keeps in check how long the guided estimate is, or how strong it is when."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from comfy import progress
from comfy.patching.wrappers import WrappersMP
from comfy_api.latest import ComfyExtension, io
from comfy_extras.guidance import Facts, patched_model_schema, with_post_cfg
from comfy_extras.nodes_slg import Span, percent_input

logger = logging.getLogger(__name__)


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


class ScaleInSpan:
    """Wrapper of kind "predict_noise": another guidance scale in a part of the sampling."""

    def __init__(self, cfg: float, span: Span) -> None:
        self.cfg, self.span = cfg, span
        self._was_said = False

    def __call__(
        self, executor: Any, x: Tensor, timestep: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        guider = executor.class_obj
        if not self.span.holds(timestep) or not self._acts_on(guider):
            return executor(x, timestep, *args, **kwargs)
        before, guider.cfg = guider.cfg, self.cfg
        try:
            return executor(x, timestep, *args, **kwargs)
        finally:
            guider.cfg = before

    def _acts_on(self, guider: Any) -> bool:
        """Whether the guider guides away from a negative list by a single scale."""
        acts = guider.has_one_scale and "negative" in guider.conds
        if not acts and not self._was_said:
            self._was_said = True
            progress.warn(
                logger,
                "CFGOverride has no effect with this guider, which has %s: use CFGGuider with it, "
                "or take it out",
                "no negative conditioning" if guider.has_one_scale else "several scales of its own",
            )
        return acts


class CFGOverride(io.ComfyNode):
    """Sets the guidance scale in a part of the sampling."""

    KEY = "cfg_override"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CFGOverride",
            display_name="CFG Override",
            category="advanced/guidance",
            description=(
                "Another cfg between two points of the sampling; at 1 the negative text costs no "
                "time. Where several of these nodes overlap, the one nearest the sampler counts."
            ),
            inputs=[
                io.Model.Input("model"),
                io.Float.Input("cfg", default=1.0, min=0.0, max=100.0, step=0.1),
                percent_input("start_percent", 0.0),
                percent_input("end_percent", 1.0),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls, model: Any, cfg: float, start_percent: float, end_percent: float
    ) -> io.NodeOutput:
        view, kind = model.clone(), WrappersMP.PREDICT_NOISE
        view.add_wrapper_with_key(
            kind, cls.KEY, ScaleInSpan(cfg, Span(model, start_percent, end_percent))
        )
        # Outside of all others, which may ask the guider for its scale, as NAGuidance does.
        wrappers = view.wrappers[kind]
        view.wrappers[kind] = {cls.KEY: wrappers.pop(cls.KEY), **wrappers}
        return io.NodeOutput(view)


class CfgExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [CFGNorm, CFGOverride, CFGZeroStar]


async def comfy_entrypoint() -> CfgExtension:
    """Called by the loader of built-in modules."""
    return CfgExtension()
