"""Text encoders of HiDream: four, each with a text of its own."""

from __future__ import annotations

from typing import Any

import folder_paths
from comfy_api.latest import io
from comfy_extras.declarations import text_input
from comfy_extras.extension import entrypoint_of
from comfy_extras.text_tokens import tokens_for
from comfy_nodes.loaders import device_inputs, load_text_encoders

ENCODERS = {"clip_l": "l", "clip_g": "g", "t5xxl": "t5xxl", "llama": "llama"}


class QuadrupleCLIPLoader(io.ComfyNode):
    """Loads four text encoders that a model uses together."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        names = folder_paths.get_filename_list("text_encoders")
        return io.Schema(
            node_id="QuadrupleCLIPLoader",
            category="advanced/loaders",
            description="Loads CLIP ViT-L, OpenCLIP ViT-bigG, T5-XXL and Llama 3.1 8B.",
            inputs=[
                *(io.Combo.Input(f"clip_name{place}", options=names) for place in (1, 2, 3, 4)),
                *device_inputs(),
            ],
            outputs=[io.Clip.Output()],
        )

    @classmethod
    def execute(
        cls,
        clip_name1: str,
        clip_name2: str,
        clip_name3: str,
        clip_name4: str,
        device: str = "default",
    ) -> io.NodeOutput:
        names = (clip_name1, clip_name2, clip_name3, clip_name4)
        paths = [folder_paths.get_full_path_or_raise("text_encoders", name) for name in names]
        return io.NodeOutput(load_text_encoders(paths, "hidream", device))

    load_clip = execute


class CLIPTextEncodeHiDream(io.ComfyNode):
    """Text to conditioning, with a text for each of the four encoders."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPTextEncodeHiDream",
            category="advanced/conditioning",
            inputs=[io.Clip.Input("clip"), *[text_input(id) for id in ENCODERS]],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, clip: Any, **texts: str) -> io.NodeOutput:
        tokens = clip.tokenize(texts["clip_g"])
        for id, name in ENCODERS.items():
            tokens[name] = tokens_for(clip, texts[id], name)
        return io.NodeOutput(clip.encode_from_tokens_scheduled(tokens))

    encode = execute


comfy_entrypoint = entrypoint_of(QuadrupleCLIPLoader, CLIPTextEncodeHiDream)
