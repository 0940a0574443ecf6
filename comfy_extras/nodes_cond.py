"""Experiments with conditioning."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

CATEGORY = "_for_testing/conditioning"


class CLIPTextEncodeControlnet(io.ComfyNode):
    """Gives control nets a text of their own."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPTextEncodeControlnet",
            category=CATEGORY,
            is_experimental=True,
            inputs=[
                io.Clip.Input("clip"),
                io.Conditioning.Input("conditioning"),
                io.String.Input("text", multiline=True, dynamic_prompts=True),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, clip: Any, conditioning: Any, text: str) -> io.NodeOutput:
        tokens = clip.tokenize(text)
        context, pooled = clip.encode_from_tokens(tokens, return_pooled=True)
        values = {"cross_attn_controlnet": context, "pooled_output_controlnet": pooled}
        return io.NodeOutput([[tensor, {**options, **values}] for tensor, options in conditioning])


class T5TokenizerOptions(io.ComfyNode):
    """Changes how far texts for T5 encoders are padded."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="T5TokenizerOptions",
            category=CATEGORY,
            is_experimental=True,
            inputs=[
                io.Clip.Input("clip"),
                io.Int.Input("min_padding", default=0, min=0, max=10000, step=1),
                io.Int.Input("min_length", default=0, min=0, max=10000, step=1),
            ],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(cls, clip: Any, min_padding: int, min_length: int) -> io.NodeOutput:
        view = clip.clone()
        for encoder in ("t5xxl", "pile_t5xl", "t5base", "mt5xl", "umt5xxl"):
            view.set_tokenizer_option(f"{encoder}_min_padding", min_padding)
            view.set_tokenizer_option(f"{encoder}_min_length", min_length)
        return io.NodeOutput(view)


comfy_entrypoint = entrypoint_of(CLIPTextEncodeControlnet, T5TokenizerOptions)
