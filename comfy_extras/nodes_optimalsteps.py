"""Noise levels found by minimising the error of few steps."""

from __future__ import annotations

from comfy.sampling.schedule_tables import OPTIMAL_STEPS, tabled_schedule
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of


class OptimalStepsScheduler(io.ComfyNode):
    """Levels of a published row, at any number of steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="OptimalStepsScheduler",
            category="sampling/custom_sampling/schedulers",
            inputs=[
                io.Combo.Input("model_type", options=list(OPTIMAL_STEPS)),
                io.Int.Input("steps", default=20, min=3, max=1000),
                io.Float.Input("denoise", default=1.0, min=0.0, max=1.0, step=0.01),
            ],
            outputs=[io.Sigmas.Output()],
        )

    @classmethod
    def execute(cls, model_type: str, steps: int, denoise: float) -> io.NodeOutput:
        return io.NodeOutput(tabled_schedule(OPTIMAL_STEPS[model_type], steps, denoise))

    get_sigmas = execute


comfy_entrypoint = entrypoint_of(OptimalStepsScheduler)
