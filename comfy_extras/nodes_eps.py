"""Scaling of the predicted noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy.sampling.parameterisation import EXPLODING
from comfy_api.latest import ComfyExtension, io
from comfy_extras.guidance import Facts, patched_model_schema, with_post_cfg

CATEGORY = "model_patches/unet"


def knob(id: str, default: float, least: float, most: float) -> io.Float.Input:
    """Declaration of a number shown as a number field."""
    return io.Float.Input(
        id,
        default=default,
        min=least,
        max=most,
        step=0.001,
        display_mode=io.NumberDisplay.number,
    )


class EpsilonScaling(io.ComfyNode):
    """Divides the predicted noise by a number close to 1.

    Source: Ning et al. 2023, https://arxiv.org/abs/2308.15321.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Epsilon Scaling",
            category=CATEGORY,
            inputs=[io.Model.Input("model"), knob("scaling_factor", 1.005, 0.5, 1.5)],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, scaling_factor: float) -> io.NodeOutput:
        factor = scaling_factor or 1e-9

        def change(facts: Facts) -> Tensor:
            x = facts["input"]
            return x - (x - facts["denoised"]) / factor

        return with_post_cfg(model, change)


class TemporalScoreRescaling(io.ComfyNode):
    """Scales the score with the noise level: sharper below k = 1, more varied above.

    Source: Xu et al. 2025, https://arxiv.org/abs/2510.01184.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return patched_model_schema(
            "TemporalScoreRescaling",
            CATEGORY,
            knob("tsr_k", 0.95, 0.01, 100.0),
            knob("tsr_sigma", 1.0, 0.01, 100.0),
            display_name="TSR - Temporal Score Rescaling",
            description="Makes pictures sharper (k below 1) or more varied (k above 1).",
        )

    @classmethod
    def execute(cls, model: Any, tsr_k: float, tsr_sigma: float) -> io.NodeOutput:
        sampling = model.get_model_object("model_sampling")
        path = getattr(sampling, "path", EXPLODING)

        def change(facts: Facts) -> Tensor:
            x, denoised = facts["input"], facts["denoised"]
            sigma = float(facts["sigma"].flatten()[0])
            alpha = path.alpha(sigma)
            if tsr_k == 1 or sigma == 0 or alpha <= 0:
                return denoised
            signal = (alpha / sigma) ** 2 * tsr_sigma**2  # signal-to-noise ratio times variance
            ratio = (signal + 1) / (signal / tsr_k + 1)
            # Clean estimate whose noise is `ratio` times the predicted one.
            return torch.lerp(x / alpha, denoised, ratio)

        return with_post_cfg(model, change)


class EpsExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [EpsilonScaling, TemporalScoreRescaling]


async def comfy_entrypoint() -> EpsExtension:
    """Called by the loader of built-in modules."""
    return EpsExtension()
