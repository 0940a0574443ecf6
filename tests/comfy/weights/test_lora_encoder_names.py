"""LoRA files under names of text encoders' weights that no layout lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comfy.weights.lora import load_lora, model_lora_keys_clip

LAYER = "text_model.encoder.layers.0."
FLAT = LAYER.replace(".", "_")
CLIP = [LAYER + n for n in ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1")] + [
    "text_model.embeddings.token_embedding", "text_projection",
]  # fmt: skip
BLOCK = "encoder.block.0.layer.0.SelfAttention.q"
WORDS = "model.layers.0.self_attn.q_proj"
INSIDE = {
    "clip_l": CLIP, "clip_g": CLIP, "clip_h": CLIP, "t5xxl": [BLOCK, "shared"], "umt5xxl": [BLOCK],
    "byt5_small": [BLOCK], "llama": [WORDS], "qwen25_7b": [WORDS], "qwen3_4b": [WORDS],
    "mistral3_24b": [WORDS],
}  # fmt: skip


def read(file_name: str, encoders: str) -> list[Any]:
    """The weights that a LoRA under a name changes in a text encoder of some parts."""
    weights = {
        f"{encoder}.transformer.{name}.weight": torch.empty(0)
        for encoder in encoders.split()
        for name in INSIDE[encoder]
    }
    keys = model_lora_keys_clip(SimpleNamespace(state_dict=lambda **_: weights))
    file = {f"{file_name}.lora_A.weight": torch.ones(2, 4),
            f"{file_name}.lora_B.weight": torch.ones(4, 2)}  # fmt: skip
    return list(load_lora(file, keys, log_missing=False))


@pytest.mark.parametrize(
    ("encoders", "name", "encoder", "inside"),
    [
        ("clip_l", f"text_encoder.{LAYER}self_attn.to_q", "clip_l", CLIP[0]),
        ("clip_l", f"text_encoder.{LAYER}self_attn.to_out", "clip_l", CLIP[1]),
        ("clip_l", f"text_encoder.base_model.model.{CLIP[0]}", "clip_l", CLIP[0]),
        ("clip_l", "text_encoder.encoder.layers.0.mlp.fc1", "clip_l", CLIP[2]),
        ("clip_l", f"base_model.model.{CLIP[2]}", "clip_l", CLIP[2]),
        ("clip_l", "base_model.model.encoder.layers.0.mlp.fc1", "clip_l", CLIP[2]),
        ("t5xxl", f"base_model.model.{BLOCK}", "t5xxl", BLOCK),
        ("clip_l t5xxl", f"base_model.model.{BLOCK}", "t5xxl", BLOCK),
        ("qwen25_7b", f"base_model.model.model.{WORDS}", "qwen25_7b", WORDS),
        ("clip_l", CLIP[2], "clip_l", CLIP[2]),
        ("clip_l", f"oft_te_{FLAT}mlp_fc1", "clip_l", CLIP[2]),
        ("clip_l", f"lycoris_te_{FLAT}mlp_fc1", "clip_l", CLIP[2]),
        ("clip_l", f"text_encoder.{CLIP[3]}", "clip_l", CLIP[3]),
        ("clip_h", f"oft_te_{FLAT}mlp_fc1", "clip_h", CLIP[2]),
        ("clip_l clip_g", f"oft_te1_{FLAT}mlp_fc1", "clip_l", CLIP[2]),
        ("clip_l clip_g", f"oft_te2_{FLAT}mlp_fc1", "clip_g", CLIP[2]),
        ("clip_l clip_g", f"text_encoder_2.{LAYER}self_attn.to_q", "clip_g", CLIP[0]),
        ("clip_l clip_g", "text_encoder_2.text_projection", "clip_g", CLIP[4]),
        ("clip_l clip_g", f"clip_g.{CLIP[2]}", "clip_g", CLIP[2]),
        ("clip_l t5xxl", f"text_encoder_2.{BLOCK}", "t5xxl", BLOCK),
        ("clip_l t5xxl", f"lora_te2_{BLOCK.replace('.', '_')}", "t5xxl", BLOCK),
        ("clip_l t5xxl", f"t5xxl.{BLOCK}", "t5xxl", BLOCK),
        ("clip_l t5xxl", "text_encoder_2.shared", "t5xxl", "shared"),
        ("clip_l clip_g t5xxl", f"text_encoder_3.{BLOCK}", "t5xxl", BLOCK),
        ("t5xxl", f"text_encoder.{BLOCK}", "t5xxl", BLOCK),
        ("umt5xxl", f"text_encoder.{BLOCK}", "umt5xxl", BLOCK),
        ("umt5xxl", f"lora_te1_{BLOCK.replace('.', '_')}", "umt5xxl", BLOCK),
        ("clip_l llama", f"text_encoder.{WORDS}", "llama", WORDS),
        ("clip_l llama", "lora_te1_layers_0_self_attn_q_proj", "llama", WORDS),
        ("clip_l llama", f"text_encoder_2.{CLIP[2]}", "clip_l", CLIP[2]),
        ("qwen25_7b", f"text_encoder.{WORDS}", "qwen25_7b", WORDS),
        ("qwen25_7b", "text_encoder.model.language_model.layers.0.self_attn.q_proj", "qwen25_7b",
         WORDS),
        ("byt5_small qwen25_7b", f"text_encoder.{WORDS}", "qwen25_7b", WORDS),
        ("byt5_small qwen25_7b", f"text_encoder_2.{BLOCK}", "byt5_small", BLOCK),
        ("qwen3_4b", f"lora_te_{WORDS.replace('.', '_')}", "qwen3_4b", WORDS),
        ("mistral3_24b", f"text_encoder.{WORDS}", "mistral3_24b", WORDS),
    ],
)  # fmt: skip
def test_a_name_is_found_in_the_encoder_it_counts(
    encoders: str, name: str, encoder: str, inside: str
) -> None:
    assert read(name, encoders) == [f"{encoder}.transformer.{inside}.weight"]


@pytest.mark.parametrize(
    ("encoders", "name"),
    [  # the second CLIP of a larger model has other sizes
        ("clip_l", f"lora_te2_{FLAT}mlp_fc1"),
        ("clip_l", f"text_encoder_2.{CLIP[2]}"),
        ("clip_l t5xxl", f"text_encoder_2.{CLIP[2]}"),
        ("clip_l clip_g", f"text_encoder_3.{CLIP[2]}"),
        ("clip_l", f"diffusion_model.{CLIP[2]}.x"),
        ("clip_l clip_g", CLIP[2]),
        ("clip_l clip_g", f"base_model.model.{CLIP[2]}"),
        ("clip_l t5xxl", f"base_model.model.{CLIP[2]}"),
    ],
)
def test_a_name_of_another_encoder_is_left_out(encoders: str, name: str) -> None:
    assert read(name, encoders) == []
