"""Masked sampling in which grey means "change later".

Source: Levin and Fried 2023, https://arxiv.org/abs/2306.00950.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comfy_api.latest import ComfyExtension, io


class DifferentialDiffusion(io.ComfyNode):
    """Lets each part of a mask take part in the sampling from its own noise level on."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="DifferentialDiffusion",
            display_name="Differential Diffusion",
            category="_for_testing",
            is_experimental=True,
            inputs=[
                io.Model.Input("model"),
                io.Float.Input("strength", default=1.0, min=0.0, max=1.0, step=0.01, optional=True),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, strength: float = 1.0) -> io.NodeOutput:
        def at_level(sigma: Tensor, denoise_mask: Tensor, extra_options: dict[str, Any]) -> Tensor:
            binary = threshold_mask(sigma, denoise_mask, extra_options)
            if 0 < strength < 1:
                return strength * binary + (1 - strength) * denoise_mask
            return binary

        view = model.clone()
        view.set_model_denoise_mask_function(at_level)
        return io.NodeOutput(view)

    apply = execute


def threshold_mask(sigma: Tensor, mask: Tensor, facts: dict[str, Any]) -> Tensor:
    """1 where the mask is at least the share of the timesteps that is still to come."""
    sampling = facts["model"].inner_model.model_sampling
    levels = facts["sigmas"]
    last = sampling.timestep(max(levels[-1], sampling.sigma_min.to(levels)))
    first = sampling.timestep(levels[0])
    now = sampling.timestep(sigma[0])
    return (mask >= (now - last) / (first - last)).to(mask.dtype)


class DifferentialDiffusionExtension(ComfyExtension):
    """The node of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [DifferentialDiffusion]


async def comfy_entrypoint() -> DifferentialDiffusionExtension:
    """Called by the loader of built-in modules."""
    return DifferentialDiffusionExtension()
