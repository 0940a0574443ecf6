"""Texts with pictures, and latents, of Qwen-Image."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from comfy import resize
from comfy.devices import placement
from comfy.text_encoders.qwen import EDIT_TEMPLATE, PICTURE
from comfy_api.latest import io
from comfy_extras.declarations import batch_input, pixels_input, text_input
from comfy_extras.extension import entrypoint_of
from comfy_extras.video_frames import appended
from comfy_nodes.latent_basics import empty_samples
from comfy_nodes.picture_basics import colours_of

PIXELS = 1024 * 1024  # of a picture to edit
SEEN_PIXELS = 384 * 384  # of a picture beside others, as the text encoder sees it
CHANNELS, CELL = 16, 8
NUMBERED = f"Picture {{}}: {PICTURE}"


def at_area(image: Tensor, pixels: int, multiple: int = 1) -> Tensor:
    """A picture [B, H, W, 3] of about ``pixels`` pixels, in its proportions.

    Args:
        multiple: What both sides are rounded to multiples of.

    Raises:
        ValueError: It has no pixels, or other axes.
    """
    if image.ndim != 4 or not image.numel():
        raise ValueError(
            f"image: expected pictures [B, H, W, C] with pixels, found {list(image.shape)}; "
            "connect the output of a node that makes pictures"
        )
    scale = math.sqrt(pixels / (image.shape[1] * image.shape[2]))
    height, width = (max(round(side * scale / multiple), 1) * multiple for side in image.shape[1:3])
    planes = colours_of(image).movedim(-1, 1)
    resized = resize.common_upscale(planes, width, height, "area", "disabled")
    return resized.movedim(1, -1)


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


class TextEncodeQwenImageEditPlus(io.ComfyNode):
    """Text and up to three pictures to conditioning; the text may name them by number."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="TextEncodeQwenImageEditPlus",
            category="advanced/conditioning",
            inputs=[
                io.Clip.Input("clip"),
                text_input("prompt"),
                io.Vae.Input("vae", optional=True),
                *(io.Image.Input(f"image{number}", optional=True) for number in (1, 2, 3)),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(
        cls,
        clip: Any,
        prompt: str,
        vae: Any = None,
        image1: Tensor | None = None,
        image2: Tensor | None = None,
        image3: Tensor | None = None,
    ) -> io.NodeOutput:
        given = [(n, one) for n, one in enumerate((image1, image2, image3), 1) if one is not None]
        text = "".join(NUMBERED.format(number) for number, _ in given) + prompt
        seen = [at_area(image, SEEN_PIXELS) for _, image in given]
        tokens = clip.tokenize(text, images=seen, llama_template=EDIT_TEMPLATE)
        conditioning = clip.encode_from_tokens_scheduled(tokens)
        if vae is not None and given:
            latents = [vae.encode(at_area(image, PIXELS, CELL)) for _, image in given]
            (conditioning,) = appended({"reference_latents": latents}, conditioning)
        return io.NodeOutput(conditioning)


class EmptyQwenImageLayeredLatentImage(io.ComfyNode):
    """An empty latent of several layers, after one for the whole picture."""

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
        samples = empty_samples(shape, placement.intermediate_device())
        return io.NodeOutput({"samples": samples})


comfy_entrypoint = entrypoint_of(
    TextEncodeQwenImageEdit, TextEncodeQwenImageEditPlus, EmptyQwenImageLayeredLatentImage
)
