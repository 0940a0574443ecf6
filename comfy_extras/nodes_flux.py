"""Guidance, schedule and latents of the FLUX models."""

from __future__ import annotations

from typing import Any

import torch

import node_helpers
from comfy.devices import placement
from comfy.sampling.schedule_curves import flux2_schedule
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

CONDITIONING = "advanced/conditioning/flux"
FLUX2_CELL, FLUX2_CHANNELS = 16, 128


class FluxGuidance(io.ComfyNode):
    """Sets the guidance scale that the model itself was taught."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxGuidance",
            category=CONDITIONING,
            inputs=[
                io.Conditioning.Input("conditioning"),
                io.Float.Input("guidance", default=3.5, min=0.0, max=100.0, step=0.1),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning: Any, guidance: float) -> io.NodeOutput:
        values = {"guidance": guidance}
        return io.NodeOutput(node_helpers.conditioning_set_values(conditioning, values))

    append = execute


class FluxDisableGuidance(io.ComfyNode):
    """Switches the model's own guidance off."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxDisableGuidance",
            category=CONDITIONING,
            description="Switches the guidance embedding off on FLUX and models like it.",
            inputs=[io.Conditioning.Input("conditioning")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning: Any) -> io.NodeOutput:
        values = {"guidance": None}
        return io.NodeOutput(node_helpers.conditioning_set_values(conditioning, values))

    append = execute


class FluxKontextMultiReferenceLatentMethod(io.ComfyNode):
    """Chooses how several reference pictures are told apart by the model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxKontextMultiReferenceLatentMethod",
            display_name="Edit Model Reference Method",
            category=CONDITIONING,
            is_experimental=True,
            inputs=[
                io.Conditioning.Input("conditioning"),
                io.Combo.Input(
                    "reference_latents_method",
                    options=["offset", "index", "uxo/uno", "index_timestep_zero"],
                ),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning: Any, reference_latents_method: str) -> io.NodeOutput:
        # Both names of the method are one to the model.
        method = "uxo" if "uxo" in reference_latents_method else reference_latents_method
        values = {"reference_latents_method": method}
        return io.NodeOutput(node_helpers.conditioning_set_values(conditioning, values))

    append = execute


class EmptyFlux2LatentImage(io.ComfyNode):
    """An empty latent of FLUX.2: 16 x 16 pixels to a cell."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def side(id: str) -> io.Int.Input:
            return io.Int.Input(id, default=1024, min=16, max=16384, step=16)

        return io.Schema(
            node_id="EmptyFlux2LatentImage",
            display_name="Empty Flux 2 Latent",
            category="latent",
            inputs=[
                side("width"),
                side("height"),
                io.Int.Input("batch_size", default=1, min=1, max=4096),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, batch_size: int = 1) -> io.NodeOutput:
        shape = (batch_size, FLUX2_CHANNELS, height // FLUX2_CELL, width // FLUX2_CELL)
        return io.NodeOutput(
            {"samples": torch.zeros(shape, device=placement.intermediate_device())}
        )

    generate = execute


class Flux2Scheduler(io.ComfyNode):
    """Noise levels shifted by the size of the picture and the number of steps."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def side(id: str) -> io.Int.Input:
            return io.Int.Input(id, default=1024, min=16, max=16384, step=1)

        return io.Schema(
            node_id="Flux2Scheduler",
            category="sampling/custom_sampling/schedulers",
            inputs=[
                io.Int.Input("steps", default=20, min=1, max=4096),
                side("width"),
                side("height"),
            ],
            outputs=[io.Sigmas.Output()],
        )

    @classmethod
    def execute(cls, steps: int, width: int, height: int) -> io.NodeOutput:
        return io.NodeOutput(flux2_schedule(steps, width, height))


comfy_entrypoint = entrypoint_of(
    FluxDisableGuidance,
    FluxGuidance,
    FluxKontextMultiReferenceLatentMethod,
    EmptyFlux2LatentImage,
    Flux2Scheduler,
)
