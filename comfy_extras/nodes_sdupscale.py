"""Conditioning of the x4 upscaler: the small picture lies beside the noise."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import node_helpers
from comfy import resize
from comfy_api.latest import io
from comfy_extras.declarations import pair_and_latent_outputs, pair_inputs
from comfy_extras.empty_latents import empty_image
from comfy_extras.extension import entrypoint_of

CELL = 4  # pixels of the large picture per latent cell, which is a pixel of the small one


class SD_4XUpscale_Conditioning(io.ComfyNode):
    """Adds the picture to enlarge to both conditionings."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SD_4XUpscale_Conditioning",
            category="conditioning/upscale_diffusion",
            inputs=[
                io.Image.Input("images"),
                *pair_inputs(),
                io.Float.Input("scale_ratio", default=4.0, min=0.0, max=10.0, step=0.01),
                io.Float.Input("noise_augmentation", default=0.0, min=0.0, max=1.0, step=0.001),
            ],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def execute(
        cls,
        images: Tensor,
        positive: Any,
        negative: Any,
        scale_ratio: float,
        noise_augmentation: float,
    ) -> io.NodeOutput:
        width = max(CELL, round(images.shape[2] * scale_ratio))
        height = max(CELL, round(images.shape[1] * scale_ratio))
        pixels = images.movedim(-1, 1) * 2.0 - 1.0
        cells = (width // CELL, height // CELL)
        small = resize.common_upscale(pixels, *cells, "bilinear", "center")
        values = {"concat_image": small, "noise_augmentation": noise_augmentation}
        return io.NodeOutput(
            node_helpers.conditioning_set_values(positive, values),
            node_helpers.conditioning_set_values(negative, values),
            {"samples": empty_image(images.shape[0], 4, height, width, CELL)},
        )

    encode = execute


comfy_entrypoint = entrypoint_of(SD_4XUpscale_Conditioning)
