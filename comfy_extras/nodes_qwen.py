"""Texts with pictures, and latents, of Qwen-Image."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from comfy import resize
from comfy.devices import placement
from comfy_api.latest import io
from comfy_extras.declarations import batch_input, pixels_input, text_input
from comfy_extras.extension import entrypoint_of
from comfy_extras.video_frames import appended

PIXELS = 1024 * 1024  # of a picture to edit
CHANNELS, CELL = 16, 8


def at_area(image: Tensor, pixels: int) -> Tensor:
    """A picture [B, H, W, 3] of about so many pixels, in its proportions."""
    height, width = image.shape[1:3]
    scale = math.sqrt(pixels / (width * height))
    resized = resize.common_upscale(
        image.movedim(-1, 1), round(width * scale), round(height * scale), "area", "disabled"
    )
    return resized.movedim(1, -1)[..., :3]


class TextEncodeQwenImageEdit(io.ComfyNode):
    """Text and the picture to edit to conditioning."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TextEncodeQwenImageEdit",
            category="advanced/conditioning",
            inputs=[
                io.Clip.Input("clip"),
                text_input("prompt"),
                io.Vae.Input("vae", optional=True),
                io.Image.Input("image", optional=True),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(
        cls, clip: Any, prompt: str, vae: Any = None, image: Tensor | None = None
    ) -> io.NodeOutput:
        pictures = [] if image is None else [at_area(image, PIXELS)]
        tokens = clip.tokenize(prompt, images=pictures)
        conditioning = clip.encode_from_tokens_scheduled(tokens)
        if vae is not None and pictures:
            latents = {"reference_latents": [vae.encode(pictures[0])]}
            (conditioning,) = appended(latents, conditioning)
        return io.NodeOutput(conditioning)


class EmptyQwenImageLayeredLatentImage(io.ComfyNode):
    """An empty latent of several layers, behind one for the whole picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyQwenImageLayeredLatentImage",
            display_name="Empty Qwen Image Layered Latent",
            category="latent/qwen",
            inputs=[
                pixels_input("width", 640),
                pixels_input("height", 640),
                io.Int.Input("layers", default=3, min=0, max=16384, step=1),
                batch_input(),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, layers: int, batch_size: int = 1) -> io.NodeOutput:
        shape = (batch_size, CHANNELS, layers + 1, height // CELL, width // CELL)
        samples = torch.zeros(shape, device=placement.intermediate_device())
        return io.NodeOutput({"samples": samples})


comfy_entrypoint = entrypoint_of(TextEncodeQwenImageEdit, EmptyQwenImageLayeredLatentImage)
