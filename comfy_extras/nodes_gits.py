"""Noise levels along regular trajectories (GITS)."""

from __future__ import annotations

from comfy.sampling.gits import NOISE_LEVELS, gits_schedule  # noqa: F401 - packs look here
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of


class GITSScheduler(io.ComfyNode):
    """Levels of a published table, at any number of steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GITSScheduler",
            category="sampling/custom_sampling/schedulers",
            inputs=[
                io.Float.Input("coeff", default=1.20, min=0.80, max=1.50, step=0.05),
                io.Int.Input("steps", default=10, min=2, max=1000),
                io.Float.Input("denoise", default=1.0, min=0.0, max=1.0, step=0.01),
            ],
            outputs=[io.Sigmas.Output()],
        )

    @classmethod
    def execute(cls, coeff: float, steps: int, denoise: float) -> io.NodeOutput:
        return io.NodeOutput(gits_schedule(coeff, steps, denoise))

    get_sigmas = execute


comfy_entrypoint = entrypoint_of(GITSScheduler)
