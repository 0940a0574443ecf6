"""Text of PixArt, whose first model is also told the size of the picture."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from comfy_extras.declarations import text_input
from comfy_extras.extension import entrypoint_of
from comfy_nodes.limits import MAX_RESOLUTION


class CLIPTextEncodePixArtAlpha(io.ComfyNode):
    """Text and size to conditioning."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPTextEncodePixArtAlpha",
            category="advanced/conditioning",
            description="For PixArt Alpha; PixArt Sigma takes an ordinary text encoding.",
            inputs=[
                *[
                    io.Int.Input(side, default=1024, min=0, max=MAX_RESOLUTION)
                    for side in ("width", "height")
                ],
                text_input("text"),
                io.Clip.Input("clip"),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, text: str, clip: Any) -> io.NodeOutput:
        size = {"width": width, "height": height}
        return io.NodeOutput(clip.encode_from_tokens_scheduled(clip.tokenize(text), add_dict=size))

    encode = execute


comfy_entrypoint = entrypoint_of(CLIPTextEncodePixArtAlpha)
