"""Conditioning of Lotus, which estimates depth and normals from pictures.

Source: He et al. 2024, https://arxiv.org/abs/2409.18124. It is Stable Diffusion 2 asked for
nothing: its only text is the empty one, without padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import folder_paths
from comfy import loading, text_loading
from comfy.weights.errors import WeightFileError
from comfy.weights.mapped_file import read_header
from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

WIDTH = 1024  # of OpenCLIP ViT-H, the text encoder of Stable Diffusion 2
# Ends of the key that only text encoders with enough layers have, in two layouts, and what its
# beginning holds where it is an image encoder's.
LAYER_MARKS = (
    "text_model.encoder.layers.22.mlp.fc1.weight",
    "transformer.resblocks.22.mlp.c_fc.weight",
)
PICTURE_MARK = "visual."
BEGIN, END = 49406, 49407  # tokens around a text
FOLDERS = ("text_encoders", "checkpoints")


def encoder_files() -> Iterable[tuple[str, str]]:
    """Folder and path of each file that holds the text encoder of Stable Diffusion 2."""
    for folder in FOLDERS:
        for name in folder_paths.get_filename_list(folder):
            path = folder_paths.get_full_path(folder, name)
            if path is not None and path.endswith((".safetensors", ".sft")) and _holds_it(path):
                yield folder, path


def _holds_it(path: str) -> bool:
    try:
        entries = read_header(path).entries
    except (WeightFileError, OSError):
        return False  # whoever loads that file is told what is wrong with it
    return any(
        key.endswith(LAYER_MARKS) and PICTURE_MARK not in key and entry.shape[-1] == WIDTH
        for key, entry in entries.items()
    )


def load_encoder(folder: str, path: str) -> Any:
    """The text encoder of one of `encoder_files`."""
    if folder == "text_encoders":
        return text_loading.load_clip([path])
    found = loading.load_checkpoint_guess_config(path, output_vae=False, output_model=False)
    return found.clip


class LotusConditioning(io.ComfyNode):
    """What the text encoder of Stable Diffusion 2 makes of the empty text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LotusConditioning",
            category="conditioning/lotus",
            inputs=[],
            outputs=[io.Conditioning.Output(display_name="conditioning")],
        )

    @classmethod
    def execute(cls) -> io.NodeOutput:
        for folder, path in encoder_files():
            clip = load_encoder(folder, path)
            if clip is not None:
                tokens = {"h": [[(BEGIN, 1.0), (END, 1.0)]]}
                return io.NodeOutput([[clip.encode_from_tokens(tokens), {}]])
        raise FileNotFoundError(
            "Lotus needs the text encoder of Stable Diffusion 2 (OpenCLIP ViT-H), and no file in "
            "models/text_encoders or models/checkpoints holds it; put text_encoder/model."
            "safetensors of Stable Diffusion 2 in models/text_encoders, or a checkpoint of it in "
            "models/checkpoints"
        )


comfy_entrypoint = entrypoint_of(LotusConditioning)
