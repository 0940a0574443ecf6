"""Networks that are recognised but cannot be loaded: their code is not built in.

They are named so that a person is told what the file is, instead of that it is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy.weights.marks import Marks, first_match

ADALN = "adaln_single.emb.timestep_embedder.linear_1.bias"

# Keys that every network of a family has (below the prefix) -> its name; the first match wins, so
# relatives with more keys stand before those with fewer.
NETWORKS: Marks = (
    (("distilled_guidance_layer.0.norms.0.scale",), "Chroma, in an early layout"),
    (
        (ADALN, "transformer_blocks.0.audio_prompt_scale_shift_table"),
        "LTX-2.5, video with sound, or a later version",
    ),
    ((ADALN, "pos_embed.proj.bias"), "PixArt, in the names of diffusers"),
    (("cap_embedder.1.weight", "cap_pad_token"), "Z-Image"),
    (("cap_embedder.1.weight",), "Lumina 2 or Z-Image, of a kind that is not known"),
    (("head.modulation",), "Wan, of a kind with other inputs"),
    (("txt_norm.weight",), "Qwen-Image"),
)


def name_of(state_dict: Mapping[str, Any], prefix: str) -> str | None:
    """The family of a network that is known by name only; None for any other file."""
    return first_match(NETWORKS, state_dict, (prefix, ""))
