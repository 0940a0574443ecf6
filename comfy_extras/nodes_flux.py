"""Guidance, schedule and latents of the FLUX models."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import node_helpers
from comfy import resize
from comfy.sampling.schedule_curves import flux2_schedule
from comfy_api.latest import io
from comfy_extras.declarations import text_input
from comfy_extras.empty_latents import empty_image
from comfy_extras.extension import entrypoint_of
from comfy_extras.text_tokens import tokens_for

CONDITIONING = "advanced/conditioning/flux"
FLUX2_CELL, FLUX2_CHANNELS = 16, 128

# Sizes (width, height) that the editing model of the first FLUX was taught, all near a megapixel;
# each serves upright and lying.
UPRIGHT_SIZES = (
    (672, 1568),
    (688, 1504),
    (720, 1456),
    (752, 1392),
    (800, 1328),
    (832, 1248),
    (880, 1184),
    (944, 1104),
)
KONTEXT_SIZES = (
    *UPRIGHT_SIZES,
    (1024, 1024),
    *((width, height) for height, width in reversed(UPRIGHT_SIZES)),
)


class CLIPTextEncodeFlux(io.ComfyNode):
    """Text to conditioning, with a text for each encoder and the model's own guidance."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPTextEncodeFlux",
            category=CONDITIONING,
            inputs=[
                io.Clip.Input("clip"),
                text_input("clip_l"),
                text_input("t5xxl"),
                io.Float.Input("guidance", default=3.5, min=0.0, max=100.0, step=0.1),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, clip: Any, clip_l: str, t5xxl: str, guidance: float) -> io.NodeOutput:
        tokens = {**clip.tokenize(clip_l), "t5xxl": tokens_for(clip, t5xxl, "t5xxl")}
        values = {"guidance": guidance}
        return io.NodeOutput(clip.encode_from_tokens_scheduled(tokens, add_dict=values))

    encode = execute


class FluxKontextImageScale(io.ComfyNode):
    """Resizes a picture to the best size for the editing model."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="FluxKontextImageScale",
            category=CONDITIONING,
            description="Resizes to the size nearest in proportion that FLUX Kontext was taught.",
            inputs=[io.Image.Input("image")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, image: Tensor) -> io.NodeOutput:
        wanted = image.shape[2] / image.shape[1]
        width, height = min(KONTEXT_SIZES, key=lambda size: abs(wanted - size[0] / size[1]))
        pixels = image.movedim(-1, 1)
        resized = resize.common_upscale(pixels, width, height, "lanczos", "center")
        return io.NodeOutput(resized.movedim(1, -1))

    scale = execute


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
        samples = empty_image(batch_size, FLUX2_CHANNELS, height, width, FLUX2_CELL)
        return io.NodeOutput({"samples": samples})

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
    CLIPTextEncodeFlux,
    FluxKontextImageScale,
    FluxDisableGuidance,
    FluxGuidance,
    FluxKontextMultiReferenceLatentMethod,
    EmptyFlux2LatentImage,
    Flux2Scheduler,
)
