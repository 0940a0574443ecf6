"""What of a LoRA file does not fit is said, with the family the file seems to be made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy.weights import lora_report
from comfy.weights.errors import NotANumberError
from comfy.weights.lora import load_lora
from comfy.weights.lora_formats.families import is_of_encoder, made_for


def file_of(*layers: tuple[str, int], style: str = "lora_down") -> dict[str, torch.Tensor]:
    up = {"lora_down": "lora_up", "lora_A": "lora_B"}[style]
    out = {}
    for name, width in layers:
        out[f"{name}.{style}.weight"] = torch.zeros(2, width)
        out[f"{name}.{up}.weight"] = torch.zeros(3, 2)
        out[f"{name}.alpha"] = torch.tensor(1.0)
    return out


@pytest.mark.parametrize(
    ("name", "width", "family"),
    [
        ("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k", 768,
         "Stable Diffusion 1"),
        ("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k", 1024,
         "Stable Diffusion 2"),
        ("lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k", 2048, "SDXL"),
        ("unet.up_blocks.0.attentions.0.transformer_blocks.0.attn1.to_k", 640,
         "Stable Diffusion or SDXL"),
        ("lora_unet_double_blocks_0_img_attn_qkv", 3072,
         "FLUX.1, or another family with its names"),
        ("transformer.single_transformer_blocks.0.attn.to_q", 3072,
         "FLUX.1, or another family with its names"),
        ("diffusion_model.double_blocks.0.img_attn.qkv", 6144, "FLUX.2"),
        ("transformer.context_embedder.token_refiner.refiner_blocks.0.attn.to_q", 3072,
         "HunyuanVideo"),
        ("lora_unet_distilled_guidance_layer_layers_0_in_layer", 5120, "Chroma"),
        ("lora_unet_joint_blocks_0_x_block_attn_qkv", 1536, "Stable Diffusion 3"),
        ("transformer.transformer_blocks.0.attn.add_q_proj", 1536, "Stable Diffusion 3"),
        ("transformer.transformer_blocks.0.attn.add_q_proj", 3072, "Qwen-Image"),
        ("diffusion_model.blocks.0.self_attn.q", 1536, "Wan"),
        ("transformer.blocks.0.attn1.to_q", 5120, "Wan"),
        ("lora_unet_blocks_0_cross_attn_k", 5120, "Wan"),
        ("diffusion_model.layers.0.attention.to_q", 3840, "Z-Image"),
        ("transformer.layers.0.attn.to_q", 2304, "Lumina 2"),
        ("transformer.transformer_blocks.0.attn1.to_q", 2048, "LTX video"),
        ("transformer.transformer_blocks.0.attn1.to_q", 1152, "PixArt"),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", 768, "a text encoder alone"),
        ("something.else", 5, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("style", ["lora_down", "lora_A"])
def test_names_and_sizes_tell_the_family(
    name: str, width: int, family: str | None, style: str
) -> None:
    assert made_for(file_of((name, width), style=style)) == family


def test_nothing_is_told_of_no_file() -> None:
    assert made_for({}) is None


@pytest.mark.parametrize(
    ("key", "is_one"),
    [("lora_te_text_model_x.alpha", True), ("lora_te2_x.alpha", True), ("text_encoder.x", True),
     ("text_encoders.t5xxl.x", True), ("clip_l.x", True), ("text_model.x", True),
     ("base_model.model.text_model.x", True), ("lora_unet_te.x", False), ("te", False),
     ("transformer.x", False), ("texture.x", False), ("tender.x", False), ("unet.x", False)],
)  # fmt: skip
def test_keys_of_text_encoders_are_known(key: str, is_one: bool) -> None:
    assert is_of_encoder(key) is is_one


def test_what_fits_no_weight_is_said_with_the_family(caplog: Any) -> None:
    file = file_of(("lora_unet_joint_blocks_0_x_block_attn_qkv", 1536))
    assert load_lora(file, {"lora_unet_a": "diffusion_model.a.weight"}) == {}
    assert "3 of 3 LoRA tensors fit no weight" in caplog.text
    assert "made for Stable Diffusion 3" in caplog.text


def test_changes_of_another_size_are_found() -> None:
    weights = {
        "a": torch.zeros(6, 4),
        "c": torch.zeros(6, 4, 3, 3),
        "packed": torch.zeros(12).int(),
    }
    fits = {
        **file_of(("a", 4)), "a.lora_up.weight": torch.zeros(6, 2),
        "c.lora_down.weight": torch.zeros(2, 4, 3, 3), "c.lora_up.weight": torch.zeros(6, 2, 1, 1),
    }  # fmt: skip
    wrong = {
        **file_of(("a", 4)), "c.hada_w1_a": torch.zeros(6, 2), "c.hada_w1_b": torch.zeros(2, 35),
        "c.hada_w2_a": torch.zeros(6, 2), "c.hada_w2_b": torch.zeros(2, 35),
    }  # fmt: skip
    keys = {"a": "a", "c": "c", "packed": "packed"}
    assert lora_report.misfits(load_lora(fits, keys), weights) == []
    assert lora_report.misfits(load_lora(wrong, keys), weights) == ["a", "c"]
    assert lora_report.misfits(load_lora({"a.diff": torch.zeros(6, 5)}, keys), weights) == ["a"]
    assert lora_report.misfits(load_lora(file_of(("packed", 4)), keys), weights) == []
    slices = {"a": ("a", (0, 3, 3))}
    assert lora_report.misfits(load_lora(file_of(("a", 4)), slices), weights) == []
    beyond = {"a": ("a", (0, 5, 3))}
    assert lora_report.misfits(load_lora(file_of(("a", 4)), beyond), weights) == [beyond["a"]]


def test_changes_that_grow_a_weight_or_only_turn_it_are_no_misfits() -> None:
    weights = {"a": torch.zeros(6, 4)}
    grown = {**file_of(("a", 8)), "a.reshape_weight": torch.tensor([3, 8])}
    assert lora_report.misfits(load_lora(grown, {"a": "a"}), weights) == []
    assert lora_report.misfits({"a": ("set", (torch.zeros(2),))}, weights) == []
    padded = {"a": ("diff", (torch.zeros(9, 9), {"pad_weight": True}))}
    assert lora_report.misfits(padded, weights) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16,
                                   torch.float8_e4m3fn])  # fmt: skip
def test_a_number_that_is_none_is_refused_wherever_it_stands(dtype: torch.dtype) -> None:
    file = {key: tensor.to(dtype) for key, tensor in file_of(("a", 400), ("b", 400)).items()}
    assert lora_report.of_numbers(file, "x.safetensors") is file
    broken = torch.zeros(2, 400)
    broken[1, 317] = float("nan")
    file["b.lora_down.weight"] = broken.to(dtype)
    with pytest.raises(NotANumberError, match=r"x.safetensors: 'b.lora_down.weight'.*NaN"):
        lora_report.of_numbers(file, "x.safetensors")


def test_large_numbers_of_half_precision_are_numbers() -> None:
    file = {**file_of(("a", 4)), "a.diff": torch.full((300, 300), 6e4, dtype=torch.float16)}
    assert lora_report.of_numbers(file, "x.safetensors") is file
