"""Perturbed attention guidance: away from an estimate whose attention is blind."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comfy.patching.options import set_model_options_patch_replace
from comfy.sampling import batching
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_extras.guidance import Facts, Replacement, for_further_estimate


def only_itself(q: Tensor, k: Tensor, v: Tensor, extra_options: Any, mask: Any = None) -> Tensor:
    """Attention of every token to itself alone."""
    del q, k, extra_options, mask
    return v


class PerturbedAttentionGuidance(io.ComfyNode):
    """Adds the difference to an estimate made without the middle block's self-attention.

    Source: Ahn et al. 2024, https://arxiv.org/abs/2403.17377.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="PerturbedAttentionGuidance",
            category="model_patches/unet",
            inputs=[
                io.Model.Input("model"),
                io.Float.Input("scale", default=3.0, min=0.0, max=100.0, step=0.01, round=0.01),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, scale: float) -> io.NodeOutput:
        blind = Replacement(only_itself, "self-attention of the middle block of a UNet")

        def change(facts: Facts) -> Tensor:
            if scale == 0:
                return facts["denoised"]
            options = for_further_estimate(facts["model_options"], "PerturbedAttentionGuidance")
            options = set_model_options_patch_replace(options, blind, "attn1", "middle", 0)
            (perturbed,) = batching.calc_cond_batch(
                facts["model"], [facts["cond"]], facts["input"], facts["sigma"], options
            )
            blind.say_if_unasked(perturbed)
            return facts["denoised"] + (facts["cond_denoised"] - perturbed) * scale

        view = model.clone()
        view.set_model_sampler_post_cfg_function(change)
        return io.NodeOutput(view)

    patch = execute


comfy_entrypoint = entrypoint_of(PerturbedAttentionGuidance)
