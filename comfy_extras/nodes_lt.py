"""Noise levels and conditioning of LTX video."""

from __future__ import annotations

import math
from typing import Any

import node_helpers
from comfy.sampling import noise_levels
from comfy.sampling import parameterisation as predictions
from comfy.sampling.schedule_curves import MAX_TOKENS, ltxv_schedule, shift_for_tokens
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

Latent = dict[str, Any]


def tokens_of(latent: Latent | None) -> int:
    """Tokens of a latent; without one, as many as the larger shift is given for."""
    return MAX_TOKENS if latent is None else math.prod(latent["samples"].shape[2:])


def shift_inputs() -> list[io.Float.Input]:
    """Declarations of the shifts for few and many tokens."""
    return [
        io.Float.Input("max_shift", default=2.05, min=0.0, max=100.0, step=0.01),
        io.Float.Input("base_shift", default=0.95, min=0.0, max=100.0, step=0.01),
    ]


class LTXVConditioning(io.ComfyNode):
    """Tells the model how many frames a second has."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVConditioning",
            category="conditioning/video_models",
            inputs=[
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                io.Float.Input("frame_rate", default=25.0, min=0.0, max=1000.0, step=0.01),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
            ],
        )

    @classmethod
    def execute(cls, positive: Any, negative: Any, frame_rate: float) -> io.NodeOutput:
        values = {"frame_rate": frame_rate}
        return io.NodeOutput(
            node_helpers.conditioning_set_values(positive, values),
            node_helpers.conditioning_set_values(negative, values),
        )

    append = execute


class ModelSamplingLTXV(io.ComfyNode):
    """Shifts a model's noise levels by the size of the latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ModelSamplingLTXV",
            category="advanced/model",
            inputs=[
                io.Model.Input("model"),
                *shift_inputs(),
                io.Latent.Input("latent", optional=True),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls, model: Any, max_shift: float, base_shift: float, latent: Latent | None = None
    ) -> io.NodeOutput:
        view = model.clone()
        kind = noise_levels.compose(noise_levels.ModelSamplingFlux, predictions.CONST)
        sampling = kind(model.model.model_config)
        sampling.set_parameters(shift=shift_for_tokens(tokens_of(latent), base_shift, max_shift))
        view.add_object_patch("model_sampling", sampling)
        return io.NodeOutput(view)


class LTXVScheduler(io.ComfyNode):
    """Noise levels shifted by the size of the latent and stretched to a last level."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LTXVScheduler",
            category="sampling/custom_sampling/schedulers",
            inputs=[
                io.Int.Input("steps", default=20, min=1, max=10000),
                *shift_inputs(),
                io.Boolean.Input("stretch", default=True),
                io.Float.Input("terminal", default=0.1, min=0.0, max=0.99, step=0.01),
                io.Latent.Input("latent", optional=True),
            ],
            outputs=[io.Sigmas.Output()],
        )

    @classmethod
    def execute(
        cls,
        steps: int,
        max_shift: float,
        base_shift: float,
        stretch: bool,
        terminal: float,
        latent: Latent | None = None,
    ) -> io.NodeOutput:
        return io.NodeOutput(
            ltxv_schedule(steps, tokens_of(latent), max_shift, base_shift, stretch, terminal)
        )

    get_sigmas = execute


comfy_entrypoint = entrypoint_of(LTXVConditioning, ModelSamplingLTXV, LTXVScheduler)
