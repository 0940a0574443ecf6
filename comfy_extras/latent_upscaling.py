"""Nodes that enlarge latents of videos with networks made for it."""

from __future__ import annotations

from typing import Any

import folder_paths
from comfy import latent_upscaling, resize
from comfy.devices import placement
from comfy_api.latest import io
from comfy_extras.declarations import pixels_input
from comfy_nodes.latent import CROP_METHODS, UPSCALE_METHODS
from comfy_nodes.latent_basics import VIDEO, Latent, samples_of

CELL, LEAST_SIDE = 16, 64  # pixels that a cell of HunyuanVideo 1.5 covers, and of a larger latent


class LatentUpscaleModelLoader(io.ComfyNode):
    """Loads a network that enlarges or refines latents of videos."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = folder_paths.get_filename_list("latent_upscale_models")
        return io.Schema(
            node_id="LatentUpscaleModelLoader",
            display_name="Load Latent Upscale Model",
            category="loaders",
            inputs=[io.Combo.Input("model_name", options=names)],
            outputs=[io.LatentUpscaleModel.Output()],
        )

    @classmethod
    def execute(cls, model_name: str) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("latent_upscale_models", model_name)
        return io.NodeOutput(latent_upscaling.load(path))


class HunyuanVideo15LatentUpscaleWithModel(io.ComfyNode):
    """Enlarges a latent of HunyuanVideo 1.5 by interpolation, and refines it with a network."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HunyuanVideo15LatentUpscaleWithModel",
            display_name="Hunyuan Video 15 Latent Upscale With Model",
            category="latent",
            inputs=[
                io.LatentUpscaleModel.Input("model"),
                io.Latent.Input("samples"),
                io.Combo.Input("upscale_method", options=UPSCALE_METHODS, default="bilinear"),
                pixels_input("width", 1280, 0, 8),
                pixels_input("height", 720, 0, 8),
                io.Combo.Input("crop", options=CROP_METHODS),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(
        cls, model: Any, samples: Latent, upscale_method: str, width: int, height: int, crop: str
    ) -> io.NodeOutput:
        """A side of 0 follows from the other one and the latent's proportions; both 0 changes
        nothing."""
        if width == 0 and height == 0:
            return io.NodeOutput(samples)
        latent = samples_of(samples, "samples", VIDEO)
        rows, columns = latent.shape[-2:]
        height = max(LEAST_SIDE, height or round(rows * max(LEAST_SIDE, width) / columns))
        width = max(LEAST_SIDE, width or round(columns * height / rows))
        size = (width // CELL, height // CELL)
        larger = resize.common_upscale(latent, *size, upscale_method, crop)
        refined = model.resample_latent(larger)
        return io.NodeOutput({"samples": refined.to(placement.intermediate_device()).float()})
