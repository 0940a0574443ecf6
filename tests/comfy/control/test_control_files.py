"""Files of control networks in every recorded layout, and those that have no recorded network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from comfy import loading as model_loading
from comfy.control import diffusers_names, loading
from comfy.control.networks import ControlNetSD35
from comfy.families import detection, diffusers_layout
from comfy.ldm.flux.controlnet import ControlNetFlux
from comfy.ldm.mmdit.dit_embedder import ControlNetEmbedder, position_waves
from comfy.ldm.mmdit.model import MMDiT
from comfy.ops.encoded import EncodedWeight, decoded_tensor
from comfy.weights.assign import assign_weights
from comfy.weights.diffusers_unet import unet_to_diffusers
from comfy.weights.state_dict import load_torch_file
from comfy_nodes.control import ControlNetApplyAdvanced
from comfy_nodes.sampling import common_ksampler
from tests.comfy.control.test_transformer_control import HintVAE
from tests.comfy.families import key_shapes
from tests.support import gguf_files
from tests.support.golden_nets import read_golden_net

# Networks that this version does not have.
NOT_HERE = ("Qwen-Image InstantX union", "Qwen-Image InstantX inpaint (68 ch)")


def recorded(golden_json: Callable[[str], Any]) -> dict[str, Any]:
    return golden_json("controlnet_detection.json")["controlnets"]


def test_every_recorded_layout_is_built_with_the_recorded_facts(
    golden_json: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full-size shapes without memory: the file has every weight of its network."""

    def compare(module: nn.Module, weights: dict[str, Tensor], part: str) -> None:
        own = {k: tuple(v.shape) for k, v in module.state_dict().items()}
        given = {k: tuple(v.shape) for k, v in weights.items() if "control_type" not in k}
        assert own.items() <= given.items(), part

    monkeypatch.setattr(loading, "fill", compare)
    monkeypatch.setattr(loading, "arrange_convolutions", lambda *_: None)
    for name, facts in recorded(golden_json).items():
        weights = key_shapes.expand(facts["file_keys"])
        if "control_type" in weights:
            kind = ("blur", "canny", "depth").index(name.split("(")[1].rstrip(")"))
            weights["control_type"] = torch.tensor([float(kind)])
        control: Any = loading.load_controlnet_state_dict(weights)
        if facts["wrapper"] is None or name in NOT_HERE:
            assert control is None, name
            continue
        assert type(control).__name__ == facts["wrapper"], name
        if facts["wrapper"] == "ControlLora":
            continue
        for fact in ("compression_ratio", "upscale_algorithm", "concat_mask"):
            assert getattr(control, fact) == facts[fact], (name, fact)
        given = torch.tensor([0.0, 0.5, 1.0])
        recorded_hint = facts.get("hint_preprocess_of_0_0.5_1", given.tolist())
        expected = torch.tensor(recorded_hint)
        assert torch.allclose(control.preprocess_image(given), expected), name


def in_the_librarys_names(weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    names = {ours: theirs for theirs, ours in unet_to_diffusers(config).items()}
    made = {}
    for key, value in weights.items():
        part = key.rpartition(".")[2]
        if key.startswith("zero_convs."):
            theirs = f"controlnet_down_blocks.{key.split('.')[1]}.{part}"
        elif key.startswith("middle_block_out."):
            theirs = f"controlnet_mid_block.{part}"
        elif key.startswith("input_hint_block."):
            number = int(key.split(".")[1]) // 2
            layer = {0: "conv_in", 7: "conv_out"}.get(number, f"blocks.{number - 1}")
            theirs = f"controlnet_cond_embedding.{layer}.{part}"
        else:
            theirs = names[key]
        made[theirs] = value
    return made


def test_a_file_in_the_librarys_names_is_the_same_network(
    golden_folder: Path, tmp_path: Path
) -> None:
    net = read_golden_net(golden_folder / "nets/controlnet_sd1.safetensors")
    found = detection.detect_unet_config(net.weights, "")
    assert found is not None
    config = {**found, "transformer_depth_output": []}
    theirs = in_the_librarys_names(net.weights, config)
    assert diffusers_layout.read_encoder_config(theirs) is not None
    ours = diffusers_names.to_native(theirs)
    assert ours is not None
    assert ours.keys() == net.weights.keys()
    assert all(torch.equal(ours[key], net.weights[key]) for key in ours)
    hints = {"unet_config": '{"num_heads": 4}'}
    answers = []
    for name, weights in (("theirs", theirs), ("ours", net.weights)):
        save_file(weights, tmp_path / f"{name}.safetensors", metadata=hints)
        control: Any = loading.load_controlnet(str(tmp_path / f"{name}.safetensors"))
        args = {k: v for k, v in net.inputs.items() if k in ("x", "hint", "context")}
        with torch.inference_mode():
            out = control.control_model(timesteps=net.inputs["t"], **args)
        answers.append(out["output"])
    assert all(torch.equal(first, second) for first, second in zip(*answers))


def sd35(double: bool) -> ControlNetEmbedder:
    network = ControlNetEmbedder(64, 1, 2, double, in_channels=4, pooled_size=12).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return network


def sd35_file(path: Path, kind: int | None = None) -> str:
    """In the names of the published files; the embedder of latents is the model's."""
    names = {ours: theirs for theirs, ours in loading.SD35_NAMES.items()}
    weights = {}
    for key, value in sd35(False).state_dict().items():
        start = next((ours for ours in names if key.startswith(ours)), "")
        weights[names.get(start, "") + key.removeprefix(start)] = value
    if kind is not None:
        weights["control_type"] = torch.tensor([kind])
    save_file(weights, path)
    return str(path)


@torch.inference_mode()
def test_a_controlnet_of_sd35_borrows_the_embedder_and_controls_a_run(
    golden_folder: Path, tmp_path: Path
) -> None:
    main = read_golden_net(golden_folder / "nets/sd35_mmdit_rms.safetensors")
    assert main.weights["x_embedder.proj.weight"].shape == (64, 4, 2, 2)
    file = tmp_path / "sd35.safetensors"
    save_file({k: v.contiguous() for k, v in main.weights.items()}, file)
    model = model_loading.load_diffusion_model(str(file))
    model.model.latent_format.latent_channels = 4  # as the recorded network has them
    pooled = main.inputs["y"][:1]
    cond = [[main.inputs["context"][:1], {"pooled_output": pooled}]]
    latent = {"samples": torch.zeros(1, 4, 8, 8)}

    def run(kind: int | None, strength: float = 1.0) -> Tensor:
        control = loading.load_controlnet(sd35_file(tmp_path / "control.safetensors", kind))
        assert isinstance(control, ControlNetSD35)
        network: Any = control.control_model
        network.y_embedder = nn.Linear(pooled.shape[1], 64)
        nn.init.constant_(network.y_embedder.weight, 0.01)
        nn.init.zeros_(network.y_embedder.bias)
        image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(1))
        apply = ControlNetApplyAdvanced().apply_controlnet
        chosen = apply(cond, cond, control, image, strength, 0.0, 1.0, vae=HintVAE(4))[0]
        out = common_ksampler(model, 3, 2, 1.0, "euler", "simple", chosen, cond, latent)
        assert not network.taken, "a run leaves nothing behind"
        samples: Tensor = out[0]["samples"]
        return samples

    blur, canny, depth = run(0), run(1), run(2)
    assert not torch.allclose(blur, canny)
    assert not torch.allclose(blur, depth)
    assert torch.equal(run(None), blur)
    assert torch.equal(run(1, 0.0), run(2, 0.0))


@pytest.mark.parametrize("is_coded", [False, True])
@torch.inference_mode()
def test_the_borrowed_embedder_is_the_models(
    is_coded: bool, golden_folder: Path, tmp_path: Path
) -> None:
    main = read_golden_net(golden_folder / "nets/sd35_mmdit_rms.safetensors")
    model = MMDiT(**main.constructor).eval()
    model.load_state_dict(main.weights)
    if is_coded:
        own = {"proj.weight": main.weights["x_embedder.proj.weight"]}
        path = gguf_files.write(tmp_path / "own.gguf", own, lambda *_: "Q8_0")
        assign_weights(model.x_embedder, load_torch_file(path))
        assert isinstance(model.x_embedder.proj, EncodedWeight)
    network = sd35(False)
    latent = torch.rand(1, 4, 8, 8)
    given = (latent, torch.tensor([500.0]), torch.rand(1, 12), None, latent)
    alone = network(*given)["output"][0]
    network.borrow(model)
    borrowed = network(*given)["output"][0]
    assert not torch.allclose(alone, borrowed)
    for key, own in network.x_embedder.state_dict().items():
        own.copy_(decoded_tensor(model.x_embedder, key))
    network.give_back()
    assert torch.equal(network(*given)["output"][0], borrowed)


@torch.inference_mode()
def test_the_form_with_one_input_feeds_all_blocks_alike() -> None:
    network = ControlNetEmbedder(128, 2, 4, True, in_channels=4, pooled_size=12).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    network.transformer_blocks[1].load_state_dict(network.transformer_blocks[0].state_dict())
    network.controlnet_blocks[1].load_state_dict(network.controlnet_blocks[0].state_dict())
    latent = torch.rand(1, 4, 8, 6)
    out = network(latent, torch.tensor([500.0]), torch.rand(1, 12), None, latent)["output"]
    assert len(out) == 4
    assert torch.equal(out[0], out[3])


def test_a_model_of_another_size_is_refused_with_both_shapes(golden_folder: Path) -> None:
    control = ControlNetSD35(sd35(False), load_device=torch.device("cpu"))

    class Other:
        model_sampling = None
        diffusion_model = nn.Module()

    with pytest.raises(ValueError, match=r"x_embedder.*\(64, 4, 2, 2\).*found none"):
        control.pre_run(Other(), lambda percent: percent)


def test_positions_reach_further_along_the_longer_side() -> None:
    waves = position_waves(8, 2, 4)
    assert waves.shape == (8, 8)
    # The first wave of a column and a row has frequency 1: rows span 0..15, columns -7.5..22.5.
    assert torch.allclose(waves[0, :1], torch.tensor(-7.5).sin())
    assert torch.allclose(waves[0, 4:5], torch.tensor(0.0).sin())
    assert torch.allclose(waves[7, :1], torch.tensor(22.5).sin(), atol=1e-5)
    assert torch.allclose(waves[7, 4:5], torch.tensor(15.0).sin(), atol=1e-5)


@torch.inference_mode()
def test_mistoline_takes_a_picture_as_it_is() -> None:
    sizes: dict[str, Any] = {
        "in_channels": 16, "out_channels": 16, "vec_in_dim": 12, "context_in_dim": 20,
        "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2,
        "depth_single_blocks": 0, "axes_dim": [4, 6, 6], "theta": 10000, "patch_size": 2,
        "qkv_bias": True, "guidance_embed": True,
    }  # fmt: skip
    network = ControlNetFlux(mistoline=True, **sizes).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    control: Any = loading.load_controlnet_state_dict(network.state_dict())
    assert control.compression_ratio == 8
    latent, picture = torch.rand(1, 16, 4, 6), torch.rand(1, 3, 32, 48)
    given = (latent, torch.tensor([0.5]), torch.rand(1, 3, 20), torch.rand(1, 12))
    out = control.control_model(*given, torch.tensor([3.5]), picture)["input"]
    assert len(out) == 19
    assert torch.equal(out[0], network(*given, torch.tensor([3.5]), picture)["input"][0])
