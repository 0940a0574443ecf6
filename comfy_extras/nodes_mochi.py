"""Latents of Mochi: 6 frames and 8 x 8 pixels to a cell of 12 channels."""

from __future__ import annotations

from comfy_api.latest import io
from comfy_extras.declarations import batch_input, frames_input, pixels_input
from comfy_extras.empty_latents import empty_video
from comfy_extras.extension import entrypoint_of


class EmptyMochiLatentVideo(io.ComfyNode):
    """An empty latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyMochiLatentVideo",
            category="latent/video",
            inputs=[
                pixels_input("width", 848),
                pixels_input("height", 480),
                frames_input(25, step=6, least=7),
                batch_input(),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, length: int, batch_size: int = 1) -> io.NodeOutput:
        samples = empty_video(batch_size, 12, length, height, width, time=6, space=8)
        return io.NodeOutput({"samples": samples})

    generate = execute


comfy_entrypoint = entrypoint_of(EmptyMochiLatentVideo)
