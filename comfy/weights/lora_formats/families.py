"""Which family a LoRA file seems to be made for, told from its names and sizes: for messages.

Only words hang on the answer; what a file changes is decided by the layouts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from comfy.weights.lora_formats.encoder_words import PREFIX
from comfy.weights.lora_formats.respelled import bare

DOWN = re.compile(
    r"(?:lora_down|lora_A|lora\.down|_lora\.down|hada_w1_b)(?:\.default)?(?:\.weight)?$"
)
UNET = r"(?:down|up|input|output)_blocks_\d|mid(?:dle)?_block_\d"


class Mark(NamedTuple):
    """One row of the table.

    Attributes:
        names: Pattern of an underscored name that such a file has.
        widths: Pattern of the layers whose number of inputs decides, if any.
        titles: Number of inputs -> family; under 0 the one where none of these is found.
    """

    names: str
    widths: str
    titles: Mapping[int, str]


MARKS = (
    Mark(
        UNET,
        r"attn2_to_[kv]$",
        {
            768: "Stable Diffusion 1",
            1024: "Stable Diffusion 2",
            2048: "SDXL",
            1280: "the refiner of SDXL",
            0: "Stable Diffusion or SDXL",
        },
    ),
    Mark(r"token_refiner_", "", {0: "HunyuanVideo"}),
    Mark(r"distilled_guidance_layer", "", {0: "Chroma"}),
    Mark(r"double_blocks_\d+_img_attn_qkv|single_(?:transformer_)?blocks_\d+_",
         r"single_blocks_\d+_linear1$|single_transformer_blocks_\d+_attn_to_q\w*$|"
         r"double_blocks_\d+_img_attn_(?:qkv|proj)$",
         {6144: "FLUX.2", 0: "FLUX.1, or another family with its names"}),
    Mark(r"joint_blocks_\d", "", {0: "Stable Diffusion 3"}),
    Mark(r"transformer_blocks_\d+_attn_(?:add_[qkv]_proj|to_add_out)|transformer_blocks_\d+_img_mlp",
         r"transformer_blocks_\d+_attn_(?:add_[qkv]_proj|to_[qkv])$",
         {3072: "Qwen-Image", 0: "Stable Diffusion 3"}),
    Mark(r"(?<!\w)blocks_\d+_(?:self_attn_[qkvo]|cross_attn_[qkvo]|attn[12]_to_)", "",
         {0: "Wan"}),
    Mark(r"layers_\d+_(?:attention|attn)_(?:qkv|to_[qkv]|out)",
         r"layers_\d+_(?:attention|attn)_(?:qkv|to_[qkv])$",
         {3840: "Z-Image", 2304: "Lumina 2", 0: "Z-Image or Lumina 2"}),
    Mark(r"transformer_blocks_\d+_attn[12]_to_", r"transformer_blocks_\d+_attn1_to_[qkv]$",
         {1152: "PixArt", 2048: "LTX video", 4096: "LTX video", 0: "PixArt or LTX video"}),
)  # fmt: skip


def is_of_encoder(key: str) -> bool:
    """Whether a key of a file speaks of a text encoder."""
    name = key.removeprefix("base_model.model.")
    return bool(PREFIX.match(key)) or name.startswith(
        ("clip_l.", "clip_g.", "clip_h.", "t5xxl.", "text_model.", "lora_prior_te_", "bundle_emb.")
    )


def made_for(lora: Mapping[str, Any]) -> str | None:
    """The family a file seems to be made for; None where its names tell nothing."""
    inputs: dict[str, int] = {}
    for key, tensor in lora.items():
        if not is_of_encoder(key):
            name = bare(_stem(key))
            inputs[name] = max(_inputs(key, tensor), inputs.get(name, 0))
    for mark in MARKS:
        if any(re.search(mark.names, name) for name in inputs):
            return mark.titles.get(_width(mark.widths, inputs.items()), mark.titles[0])
    if lora and all(is_of_encoder(key) for key in lora):
        return "a text encoder alone"
    return None


def _stem(key: str) -> str:
    """The name before the adapter's own words, for all spellings."""
    return re.split(
        r"\.(?:lora|hada_|lokr_|oft_|alpha$|dora_scale$|diff|processor\.)|_lora\.", key
    )[0]


def _inputs(key: str, tensor: Any) -> int:
    shape: Any = getattr(tensor, "shape", ())
    return int(shape[1]) if DOWN.search(key) and len(shape) > 1 else 0


def _width(pattern: str, inputs: Iterable[tuple[str, int]]) -> int:
    """Inputs of the first layer that a pattern names."""
    found = (width for name, width in inputs if width and pattern and re.search(pattern, name))
    return next(found, 0)
