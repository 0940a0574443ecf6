"""Enlarging pictures with a network made for it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import folder_paths
from comfy_api.latest import io
from comfy_extras import upscaling
from comfy_extras.extension import entrypoint_of


class UpscaleModelLoader(io.ComfyNode):
    """Loads a network that enlarges pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="UpscaleModelLoader",
            display_name="Load Upscale Model",
            category="loaders",
            inputs=[
                io.Combo.Input(
                    "model_name", options=folder_paths.get_filename_list("upscale_models")
                ),
            ],
            outputs=[io.UpscaleModel.Output()],
        )

    @classmethod
    def execute(cls, model_name: str) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("upscale_models", model_name)
        return io.NodeOutput(upscaling.load_network(path))

    load_model = execute


class ImageUpscaleWithModel(io.ComfyNode):
    """Enlarges pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ImageUpscaleWithModel",
            display_name="Upscale Image (using Model)",
            category="image/upscaling",
            inputs=[io.UpscaleModel.Input("upscale_model"), io.Image.Input("image")],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(cls, upscale_model: Any, image: Tensor) -> io.NodeOutput:
        return io.NodeOutput(upscaling.enlarge(upscale_model, image))

    upscale = execute


comfy_entrypoint = entrypoint_of(UpscaleModelLoader, ImageUpscaleWithModel)
