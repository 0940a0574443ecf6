"""Image encoders against recorded tiny networks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comfy import clip_vision
from comfy.ldm.clip.vision import CLIPVisionModelProjection
from comfy.weights.fill import IncompleteWeightsError
from tests.support.golden_nets import assert_close_to_golden, read_golden_net


@pytest.mark.parametrize("name", ["clip_vision_model", "siglip_vision_model"])
@torch.inference_mode()
def test_towers_agree_with_the_reference(name: str, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / f"text_encoders/{name}.safetensors")
    model = CLIPVisionModelProjection(net.constructor, torch.float32)
    model.load_state_dict(net.weights)
    out = model(net.inputs["pixel_values"], intermediate_output=-2)
    for number in range(3):
        assert_close_to_golden(out[number], net.outputs[f"o{number}"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("size28_crop", {}),
        ("size28_nocrop", {"crop": False}),
        ("size28_siglip_mean.5", {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}),
    ],
)
def test_preparation_agrees_with_the_reference(name, options, golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "text_encoders/clip_preprocess.safetensors")
    out = clip_vision.clip_preprocess(net.inputs["image_nhwc"], size=28, **options)
    torch.testing.assert_close(out, net.outputs[name], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_an_encoder_is_built_from_its_shapes(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "text_encoders/clip_vision_model.safetensors")
    encoder = clip_vision.load_clipvision_from_sd(
        {f"x.{key}": value for key, value in net.weights.items()}, prefix="x."
    )
    out = encoder.encode_image(torch.rand(2, 40, 60, 3))
    assert out["image_embeds"].shape == (2, 24)
    assert out.penultimate_hidden_states.shape == out.last_hidden_state.shape == (2, 17, 32)
    assert encoder.get_sd().keys() == net.weights.keys()


def test_openclip_names_become_clip_names(golden_folder: Path) -> None:
    net = read_golden_net(golden_folder / "text_encoders/clip_vision_model.safetensors")
    back = {
        "embeddings.class_embedding": "class_embedding",
        "embeddings.patch_embedding.weight": "conv1.weight",
        "embeddings.position_embedding.weight": "positional_embedding",
        "pre_layrnorm": "ln_pre",
        "post_layernorm": "ln_post",
        "encoder.layers": "transformer.resblocks",
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
        "self_attn.out_proj": "attn.out_proj",
    }
    openclip: dict[str, torch.Tensor] = {}
    for key, value in net.weights.items():
        name = key.removeprefix("vision_model.")
        for new, old in back.items():
            name = name.replace(new, old)
        if name == "visual_projection.weight":
            openclip["visual.proj"] = value.T
        elif "self_attn." not in name:
            openclip[f"visual.{name}"] = value
        elif "q_proj" in name:
            parts = [net.weights[key.replace("q_proj", f"{p}_proj")] for p in "qkv"]
            place = name.replace("self_attn.q_proj.", "attn.in_proj_")
            openclip[f"visual.{place}"] = torch.cat(parts)
    converted = clip_vision.convert_to_transformers(openclip, "visual.")
    assert converted.keys() == net.weights.keys()
    assert all(torch.equal(converted[key], net.weights[key]) for key in converted)


def test_other_files_are_refused() -> None:
    with pytest.raises(IncompleteWeightsError, match=r"foo"):
        clip_vision.load_clipvision_from_sd({"foo": torch.zeros(1)})


@pytest.mark.parametrize(
    ("width", "tokens", "patch", "siglip", "expected"),
    [
        (1024, 257, 14, False, (224, 16, "quick_gelu")),
        (1280, 257, 14, False, (224, 16, "gelu")),
        (1024, 577, 14, False, (336, 16, "quick_gelu")),
        (1152, 729, 14, True, (384, 16, "gelu_pytorch_tanh")),
        (1152, 1024, 16, True, (512, 16, "gelu_pytorch_tanh")),
    ],
)
def test_full_sizes_are_told_apart(width, tokens, patch, siglip, expected) -> None:
    root = "vision_model."
    sd = {
        f"{root}embeddings.patch_embedding.weight": torch.empty(
            width, 3, patch, patch, device="meta"
        ),
        f"{root}embeddings.position_embedding.weight": torch.empty(tokens, width, device="meta"),
        f"{root}encoder.layers.0.mlp.fc1.weight": torch.empty(4 * width, width, device="meta"),
    }
    if not siglip:
        sd[f"{root}embeddings.class_embedding"] = torch.empty(width, device="meta")
    config = clip_vision.vision_config(sd)
    assert (config["image_size"], config["num_attention_heads"], config["hidden_act"]) == expected
