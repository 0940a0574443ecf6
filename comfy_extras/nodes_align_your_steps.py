"""Noise levels optimised for model families.

Source: Sabour et al. 2024, https://arxiv.org/abs/2404.14507.
"""

from __future__ import annotations

from collections.abc import Sequence

from comfy.sampling.schedule_tables import (
    ALIGN_YOUR_STEPS,
    interpolate_log_linear,
    tabled_schedule,
)
from comfy_api.latest import ComfyExtension, io

NOISE_LEVELS = ALIGN_YOUR_STEPS


def loglinear_interp(t_steps: Sequence[float], num_steps: int) -> list[float]:
    """`num_steps` levels over a descending row, linear in the logarithm between its entries."""
    return interpolate_log_linear(t_steps, num_steps)


class AlignYourStepsScheduler(io.ComfyNode):
    """Levels of a published row, at any number of steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="AlignYourStepsScheduler",
            category="sampling/custom_sampling/schedulers",
            inputs=[
                io.Combo.Input("model_type", options=list(ALIGN_YOUR_STEPS)),
                io.Int.Input("steps", default=10, min=1, max=10000),
                io.Float.Input("denoise", default=1.0, min=0.0, max=1.0, step=0.01),
            ],
            outputs=[io.Sigmas.Output()],
        )

    @classmethod
    def execute(cls, model_type: str, steps: int, denoise: float = 1.0) -> io.NodeOutput:
        return io.NodeOutput(tabled_schedule(ALIGN_YOUR_STEPS[model_type], steps, denoise))

    get_sigmas = execute


class AlignYourStepsExtension(ComfyExtension):
    """The node of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [AlignYourStepsScheduler]


async def comfy_entrypoint() -> AlignYourStepsExtension:
    """Called by the loader of built-in modules."""
    return AlignYourStepsExtension()
