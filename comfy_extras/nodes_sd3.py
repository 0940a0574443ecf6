"""Text, latents, control and guidance of Stable Diffusion 3."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import folder_paths
from comfy_api.latest import io
from comfy_extras.declarations import batch_input, pair_inputs, pair_outputs, pixels_input
from comfy_extras.declarations import text_input as text
from comfy_extras.empty_latents import empty_image
from comfy_extras.extension import entrypoint_of
from comfy_extras.nodes_slg import Span, guided_by_skipping, layers_input, layers_of, percent_input
from comfy_extras.text_tokens import tokens_for
from comfy_nodes.control import ControlNetApplyAdvanced
from comfy_nodes.loaders import device_inputs, load_text_encoders

CELL, CHANNELS = 8, 16  # pixels of a side and channels of a latent cell


class TripleCLIPLoader(io.ComfyNode):
    """Loads the three text encoders of Stable Diffusion 3."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = folder_paths.get_filename_list("text_encoders")
        return io.Schema(
            node_id="TripleCLIPLoader",
            category="advanced/loaders",
            description="Loads CLIP ViT-L, OpenCLIP ViT-bigG and T5-XXL, in any order.",
            inputs=[
                *(io.Combo.Input(f"clip_name{place}", options=names) for place in (1, 2, 3)),
                *device_inputs(),
            ],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(
        cls, clip_name1: str, clip_name2: str, clip_name3: str, device: str = "default"
    ) -> io.NodeOutput:
        names = (clip_name1, clip_name2, clip_name3)
        paths = [folder_paths.get_full_path_or_raise("text_encoders", name) for name in names]
        return io.NodeOutput(load_text_encoders(paths, "sd3", device))

    load_clip = execute


class EmptySD3LatentImage(io.ComfyNode):
    """An empty latent of 16 channels."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptySD3LatentImage",
            category="latent/sd3",
            inputs=[pixels_input("width", 1024), pixels_input("height", 1024), batch_input()],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, batch_size: int = 1) -> io.NodeOutput:
        samples = empty_image(batch_size, CHANNELS, height, width, CELL)
        return io.NodeOutput({"samples": samples})

    generate = execute


class CLIPTextEncodeSD3(io.ComfyNode):
    """Text to conditioning, with a text for each of the three encoders."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPTextEncodeSD3",
            category="advanced/conditioning",
            inputs=[
                io.Clip.Input("clip"),
                *[text(id) for id in ("clip_l", "clip_g", "t5xxl")],
                io.Combo.Input("empty_padding", options=["none", "empty_prompt"]),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(
        cls, clip: Any, clip_l: str, clip_g: str, t5xxl: str, empty_padding: str
    ) -> io.NodeOutput:
        texts = {"l": clip_l, "g": clip_g, "t5xxl": t5xxl}
        leave_out = empty_padding == "none"
        tokens = {
            name: [] if leave_out and not written else tokens_for(clip, written, name)
            for name, written in texts.items()
        }
        # The states of both CLIP encoders lie side by side, so both need as many chunks.
        chunks = max(len(tokens["l"]), len(tokens["g"]))
        for name in ("l", "g"):
            while len(tokens[name]) < chunks:
                tokens[name] = tokens[name] + tokens_for(clip, "", name)
        return io.NodeOutput(clip.encode_from_tokens_scheduled(tokens))

    encode = execute


class ControlNetApplySD3(io.ComfyNode):
    """Adds a control network whose hint is a latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def percent(id: str, default: float) -> io.Float.Input:
            return io.Float.Input(id, default=default, min=0.0, max=1.0, step=0.001)

        return io.Schema(
            node_id="ControlNetApplySD3",
            display_name="Apply Controlnet with VAE",
            category="conditioning/controlnet",
            is_deprecated=True,
            inputs=[
                *pair_inputs(),
                io.ControlNet.Input("control_net"),
                io.Vae.Input("vae"),
                io.Image.Input("image"),
                io.Float.Input("strength", default=1.0, min=0.0, max=10.0, step=0.01),
                percent("start_percent", 0.0),
                percent("end_percent", 1.0),
            ],
            outputs=pair_outputs(),
        )

    @classmethod
    def execute(
        cls,
        positive: Any,
        negative: Any,
        control_net: Any,
        vae: Any,
        image: Tensor,
        strength: float,
        start_percent: float,
        end_percent: float,
    ) -> io.NodeOutput:
        apply = ControlNetApplyAdvanced().apply_controlnet
        span = (start_percent, end_percent)
        return io.NodeOutput(*apply(positive, negative, control_net, image, strength, *span, vae))

    apply_controlnet = execute


class SkipLayerGuidanceSD3(io.ComfyNode):
    """Adds the difference to an estimate made without some joint blocks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SkipLayerGuidanceSD3",
            category="advanced/guidance",
            description="Guides away from the estimate of the network without some layers.",
            is_experimental=True,
            inputs=[
                io.Model.Input("model"),
                layers_input("layers"),
                io.Float.Input("scale", default=3.0, min=0.0, max=10.0, step=0.1),
                percent_input("start_percent", 0.01),
                percent_input("end_percent", 0.15),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls, model: Any, layers: str, scale: float, start_percent: float, end_percent: float
    ) -> io.NodeOutput:
        double = layers_of(layers)
        if not double:
            return io.NodeOutput(model)
        span = Span(model, start_percent, end_percent)
        return io.NodeOutput(guided_by_skipping(model, double, [], scale, span, 0.0))

    skip_guidance_sd3 = execute


comfy_entrypoint = entrypoint_of(
    TripleCLIPLoader,
    EmptySD3LatentImage,
    CLIPTextEncodeSD3,
    ControlNetApplySD3,
    SkipLayerGuidanceSD3,
)
