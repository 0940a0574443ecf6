"""Text encoding nodes for SDXL, with the sizes its network is told."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import ComfyExtension, io
from comfy_extras.text_tokens import tokens_for
from comfy_nodes.limits import MAX_RESOLUTION


def size_input(id: str, default: int) -> io.Int.Input:
    """Declaration of a size or crop in pixels."""
    return io.Int.Input(id, default=default, min=0, max=MAX_RESOLUTION)


def text_input(id: str) -> io.String.Input:
    """Declaration of a text of several lines."""
    return io.String.Input(id, multiline=True, dynamic_prompts=True)


class CLIPTextEncodeSDXLRefiner(io.ComfyNode):
    """Text to conditioning for the SDXL refiner."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPTextEncodeSDXLRefiner",
            category="advanced/conditioning",
            inputs=[
                io.Float.Input("ascore", default=6.0, min=0.0, max=1000.0, step=0.01),
                size_input("width", 1024),
                size_input("height", 1024),
                text_input("text"),
                io.Clip.Input("clip"),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, ascore: float, width: int, height: int, text: str, clip: Any) -> io.NodeOutput:
        sizes = {"aesthetic_score": ascore, "width": width, "height": height}
        tokens = clip.tokenize(text)
        return io.NodeOutput(clip.encode_from_tokens_scheduled(tokens, add_dict=sizes))

    encode = execute


class CLIPTextEncodeSDXL(io.ComfyNode):
    """Text to conditioning for SDXL, with a text for each of its two encoders."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPTextEncodeSDXL",
            category="advanced/conditioning",
            inputs=[
                io.Clip.Input("clip"),
                size_input("width", 1024),
                size_input("height", 1024),
                size_input("crop_w", 0),
                size_input("crop_h", 0),
                size_input("target_width", 1024),
                size_input("target_height", 1024),
                text_input("text_g"),
                text_input("text_l"),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(
        cls,
        clip: Any,
        width: int,
        height: int,
        crop_w: int,
        crop_h: int,
        target_width: int,
        target_height: int,
        text_g: str,
        text_l: str,
    ) -> io.NodeOutput:
        tokens = clip.tokenize(text_g)
        tokens["g"] = tokens_for(clip, text_g, "g")
        tokens["l"] = tokens_for(clip, text_l, "l")
        empty = clip.tokenize("")
        for shorter, longer in (("l", "g"), ("g", "l")):
            while len(tokens[shorter]) < len(tokens[longer]):
                tokens[shorter] += empty[shorter]
        sizes = {
            "width": width,
            "height": height,
            "crop_w": crop_w,
            "crop_h": crop_h,
            "target_width": target_width,
            "target_height": target_height,
        }
        return io.NodeOutput(clip.encode_from_tokens_scheduled(tokens, add_dict=sizes))

    encode = execute


class ClipSdxlExtension(ComfyExtension):
    """The nodes of this module."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [CLIPTextEncodeSDXLRefiner, CLIPTextEncodeSDXL]


async def comfy_entrypoint() -> ClipSdxlExtension:
    """Called by the loader of built-in modules."""
    return ClipSdxlExtension()
