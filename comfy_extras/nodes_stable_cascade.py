"""Latents and conditioning of Stable Cascade, which works in two stages.

Stage C makes a small latent from the text, stage B a larger one from that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import node_helpers
from comfy import resize
from comfy_api.latest import io
from comfy_extras.declarations import batch_input, pixels_input
from comfy_extras.empty_latents import empty_image
from comfy_extras.extension import entrypoint_of

LATENTS = "latent/stable_cascade"
C_CHANNELS, B_CHANNELS = 16, 4
B_CELL = 4  # pixels per cell of stage B


def compression_input() -> io.Int.Input:
    """Pixels per cell of stage C."""
    return io.Int.Input("compression", default=42, min=4, max=128, step=1)


def stage_outputs() -> list[io.Output]:
    """The latents of both stages."""
    return [
        io.Latent.Output(display_name="stage_c"),
        io.Latent.Output(display_name="stage_b"),
    ]


class StableCascade_EmptyLatentImage(io.ComfyNode):
    """Empty latents for both stages."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="StableCascade_EmptyLatentImage",
            category=LATENTS,
            inputs=[
                pixels_input("width", 1024, 256, 8),
                pixels_input("height", 1024, 256, 8),
                compression_input(),
                batch_input(),
            ],
            outputs=stage_outputs(),
        )

    @classmethod
    def execute(
        cls, width: int, height: int, compression: int, batch_size: int = 1
    ) -> io.NodeOutput:
        return io.NodeOutput(
            {"samples": empty_image(batch_size, C_CHANNELS, height, width, compression)},
            {"samples": empty_image(batch_size, B_CHANNELS, height, width, B_CELL)},
        )

    generate = execute


class StableCascade_StageC_VAEEncode(io.ComfyNode):
    """A picture as a latent of stage C, and an empty latent of its size for stage B."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="StableCascade_StageC_VAEEncode",
            category=LATENTS,
            inputs=[io.Image.Input("image"), io.Vae.Input("vae"), compression_input()],
            outputs=stage_outputs(),
        )

    @classmethod
    def execute(cls, image: Tensor, vae: Any, compression: int) -> io.NodeOutput:
        count, height, width = image.shape[:3]
        ratio = vae.downscale_ratio
        if min(width, height) < compression:
            raise ValueError(
                f"image: expected sides of at least {compression} pixels (compression), found "
                f"{width} x {height}; enlarge it or lower compression"
            )
        across, down = width // compression * ratio, height // compression * ratio
        fitting = resize.common_upscale(image.movedim(-1, 1), across, down, "bicubic", "center")
        latent = vae.encode(fitting.movedim(1, -1)[..., :3])
        # Whole cells of 8 pixels, of which stage B has two by two.
        rows, columns = height // 8 * 8, width // 8 * 8
        empty = empty_image(count, B_CHANNELS, rows, columns, B_CELL)
        return io.NodeOutput({"samples": latent}, {"samples": empty})

    generate = execute


class StableCascade_StageB_Conditioning(io.ComfyNode):
    """Gives stage B the result of stage C."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="StableCascade_StageB_Conditioning",
            category="conditioning/stable_cascade",
            inputs=[io.Conditioning.Input("conditioning"), io.Latent.Input("stage_c")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning: Any, stage_c: dict[str, Any]) -> io.NodeOutput:
        values = {"stable_cascade_prior": stage_c["samples"]}
        return io.NodeOutput(node_helpers.conditioning_set_values(conditioning, values))

    set_prior = execute


class StableCascade_SuperResolutionControlnet(io.ComfyNode):
    """A picture as the hint of the super-resolution control network, and empty latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="StableCascade_SuperResolutionControlnet",
            category="_for_testing/stable_cascade",
            is_experimental=True,
            inputs=[io.Image.Input("image"), io.Vae.Input("vae")],
            outputs=[io.Image.Output(display_name="controlnet_input"), *stage_outputs()],
        )

    @classmethod
    def execute(cls, image: Tensor, vae: Any) -> io.NodeOutput:
        count, height, width = image.shape[:3]
        hint = vae.encode(image[..., :3]).movedim(1, -1)
        # The result is twice as large as the picture in both directions.
        return io.NodeOutput(
            hint,
            {"samples": empty_image(count, C_CHANNELS, height, width, 16)},
            {"samples": empty_image(count, B_CHANNELS, height, width, 2)},
        )

    generate = execute


comfy_entrypoint = entrypoint_of(
    StableCascade_EmptyLatentImage,
    StableCascade_StageB_Conditioning,
    StableCascade_StageC_VAEEncode,
    StableCascade_SuperResolutionControlnet,
)
