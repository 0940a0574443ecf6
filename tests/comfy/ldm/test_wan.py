"""Wan's networks and autoencoders against recorded tiny networks and recorded layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.ldm.wan.model import VaceWanModel, WanModel
from comfy.ldm.wan.vae import WanVAE
from comfy.vae.kinds import detect_autoencoder
from tests.comfy.families import key_shapes
from tests.support.golden_nets import GoldenNet, assert_close_to_golden, read_golden_net


def golden(folder: Path, name: str) -> GoldenNet:
    return read_golden_net(folder / f"nets/{name}.safetensors")


def network(net: GoldenNet) -> WanModel:
    sizes: dict[str, Any] = {k: v for k, v in net.constructor.items() if k != "img_emb"}
    if "img_emb.proj.0.weight" in net.weights:
        sizes["image_dim"] = net.weights["img_emb.proj.0.weight"].shape[0]
    kind = VaceWanModel if sizes["model_type"] == "vace" else WanModel
    model = kind(**sizes).eval()
    model.load_state_dict(net.weights)
    return model


@pytest.mark.parametrize("name", ["wan21_t2v", "wan21_i2v", "wan21_vace"])
@torch.inference_mode()
def test_networks_agree_with_the_reference(name: str, golden_folder: Path) -> None:
    net = golden(golden_folder, name)
    model = network(net)
    for call, args in net.calls().items():
        given: dict[str, Any] = dict(args)
        if "vace_context" in given:
            given["vace_strength"] = [0.8]
        out = model(given.pop("x"), given.pop("t"), **given)
        assert_close_to_golden(out, net.outputs[call])


@torch.inference_mode()
def test_a_time_for_each_frame_is_that_time_for_all(golden_folder: Path) -> None:
    net = golden(golden_folder, "wan21_t2v")
    model, args = network(net), net.calls()["a"]
    times = args["t"][:, None].expand(-1, args["x"].shape[2])
    assert_close_to_golden(model(args["x"], times, args["context"]), net.outputs["a"])
    first_known = times.clone()
    first_known[:, 0] = 0
    assert not torch.allclose(model(args["x"], first_known, args["context"]), net.outputs["a"])


@torch.inference_mode()
def test_frames_behind_are_looked_at_and_left_out(golden_folder: Path) -> None:
    net = golden(golden_folder, "wan21_t2v")
    model, args = network(net), net.calls()["a"]
    behind = args["x"][:1, :, :1]
    out = model(args["x"], args["t"], args["context"], time_dim_concat=behind)
    assert out.shape == net.outputs["a"].shape
    assert not torch.allclose(out, net.outputs["a"])


@torch.inference_mode()
def test_blocks_are_replaced_one_by_one(golden_folder: Path) -> None:
    net = golden(golden_folder, "wan21_t2v")
    model, args = network(net), net.calls()["a"]
    seen = []

    def keep(given: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        seen.append(given["transformer_options"]["block_index"])
        return extra["original_block"](given)

    options = {"patches_replace": {"dit": {("double_block", 1): keep}}}
    out = model(args["x"], args["t"], args["context"], transformer_options=options)
    assert seen == [1]
    assert_close_to_golden(out, net.outputs["a"])


@torch.inference_mode()
def test_a_reference_and_a_camera_change_the_answer_not_its_size() -> None:
    sizes: dict[str, Any] = {
        "model_type": "camera", "in_dim": 4, "out_dim": 4, "dim": 24, "ffn_dim": 16,
        "num_heads": 2, "num_layers": 1, "text_dim": 8, "freq_dim": 16, "image_dim": 8,
        "in_dim_ref_conv": 4, "in_dim_control_adapter": 2,
    }  # fmt: skip
    model = WanModel(**sizes).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    args: dict[str, Any] = {
        "x": torch.randn(1, 4, 2, 4, 6), "timestep": torch.tensor([500.0]),
        "context": torch.randn(1, 3, 8),
    }  # fmt: skip
    plain = model(**args)
    assert plain.shape == args["x"].shape
    for more in (
        {"reference_latent": torch.randn(1, 4, 4, 6)},
        {"camera_conditions": torch.randn(1, 2, 2, 32, 48)},
        {"clip_fea": torch.randn(1, 5, 8)},
    ):
        out = model(**args, **more)
        assert out.shape == plain.shape
        assert not torch.allclose(out, plain), more.keys()


def test_heads_of_an_odd_size_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"30 channels.*10 heads"):
        WanModel(dim=30, num_heads=10)


def autoencoder(net: GoldenNet) -> WanVAE:
    spec = detect_autoencoder(net.weights)
    assert spec is not None
    assert spec.name == "Wan 2.1"
    model = spec.build().eval()
    model.load_state_dict(net.weights)
    assert isinstance(model, WanVAE)
    return model


@torch.inference_mode()
def test_the_autoencoder_agrees_with_the_reference(golden_folder: Path) -> None:
    net = golden(golden_folder, "wan21_vae")
    model = autoencoder(net)
    assert_close_to_golden(model.encode(net.inputs["video_-1_1"]), net.outputs["encode_5f"])
    assert_close_to_golden(model.encode(net.inputs["image_-1_1"]), net.outputs["encode_1f"])
    z = net.inputs["z"]
    assert_close_to_golden(model.decode(z), net.outputs["decode_2latent_frames"])
    assert_close_to_golden(model.decode(z[:, :, :1]), net.outputs["decode_1"])


@pytest.mark.parametrize(
    "name",
    ["Wan 2.1", "Wan 2.1 style with 4 image channels (Qwen-Image layered)", "Wan 2.2"],
)
def test_full_size_autoencoders_have_the_recorded_keys_and_facts(
    name: str, golden_folder: Path, golden_json: Any
) -> None:
    weights = key_shapes.expand(key_shapes.recorded(golden_folder)["vaes"][name])
    spec = detect_autoencoder(weights)
    assert spec is not None
    built = spec.build(device="meta").state_dict()
    assert {k: v.shape for k, v in built.items()} == {k: v.shape for k, v in weights.items()}
    facts = golden_json("vae_detection.json")[name]
    for fact in ("latent_channels", "latent_dim", "output_channels", "pad_channel_value"):
        assert getattr(spec, fact) == facts[fact], fact
    for ratio in ("downscale_ratio", "upscale_ratio"):
        frames, *space = getattr(spec, ratio)
        times = [frames(count) for count in (1, 2, 5, 9, 17, 33)]
        assert times == facts[ratio]["time_fn_at_1_2_5_9_17_33"]
        assert space == facts[ratio]["spatial"]


def small_wan22() -> WanVAE:
    model = WanVAE(dim=8, z_dim=4, num_res_blocks=1, patch=2, has_shortcuts=True).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return model


@torch.inference_mode()
def test_the_autoencoder_of_wan22_looks_back_only() -> None:
    model = small_wan22()
    spec = detect_autoencoder(model.state_dict())
    assert spec is not None
    assert (spec.name, spec.upscale_ratio[1:]) == ("Wan 2.2", (16, 16))  # type: ignore[index]
    video = torch.rand(1, 3, 9, 32, 48)
    latent = model.encode(video)
    assert latent.shape == (1, 4, 3, 2, 3)
    assert torch.allclose(model.encode(video[:, :, :5]), latent[:, :, :2], atol=1e-6)
    made = model.decode(latent)
    assert made.shape == video.shape
    assert torch.allclose(model.decode(latent[:, :, :2]), made[:, :, :5], atol=1e-5)


@torch.inference_mode()
def test_frames_beyond_a_whole_number_of_latents_are_left_out(golden_folder: Path) -> None:
    model = autoencoder(golden(golden_folder, "wan21_vae"))
    video: Tensor = torch.rand(1, 3, 7, 16, 16)
    assert torch.equal(model.encode(video), model.encode(video[:, :, :5]))
