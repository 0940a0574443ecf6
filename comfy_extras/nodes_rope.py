"""Scales and shifts the positions a transformer sees."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of


def scale_input(id: str) -> io.Float.Input:
    """Declaration of a factor of positions."""
    return io.Float.Input(id, default=1.0, min=0.0, max=100.0, step=0.1)


def shift_input(id: str) -> io.Float.Input:
    """Declaration of an offset of positions."""
    return io.Float.Input(id, default=0.0, min=-256.0, max=256.0, step=0.1)


class ScaleROPE(io.ComfyNode):
    """Changes the rotary positions along width, height and time."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        axes = [maker(f"{name}_{axis}") for axis in "xyt" for name, maker in MAKERS.items()]
        return io.Schema(
            node_id="ScaleROPE",
            category="advanced/model_patches",
            description="Scales and shifts the rotary positions of the model.",
            is_experimental=True,
            inputs=[io.Model.Input("model"), *axes],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        scale_x: float,
        shift_x: float,
        scale_y: float,
        shift_y: float,
        scale_t: float,
        shift_t: float,
    ) -> io.NodeOutput:
        view = model.clone()
        view.set_model_rope_options(scale_x, shift_x, scale_y, shift_y, scale_t, shift_t)
        return io.NodeOutput(view)


MAKERS = {"scale": scale_input, "shift": shift_input}

comfy_entrypoint = entrypoint_of(ScaleROPE)
