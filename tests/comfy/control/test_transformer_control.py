"""ControlNets of FLUX.1 and Stable Diffusion 3: recorded networks, files, their place in a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy import loading
from comfy.control.loading import load_controlnet
from comfy.control.networks import ControlNet
from comfy.ldm.flux.controlnet import ControlNetFlux
from comfy.ldm.mmdit.controlnet import ControlNet as SD3ControlNet
from comfy.weights.diffusers_mmdit import convert_diffusers_mmdit
from comfy.weights.diffusers_transformers import flux_to_diffusers, mmdit_to_diffusers
from comfy_extras.nodes_controlnet import SetUnionControlNetType
from comfy_nodes.control import ControlNetApplyAdvanced
from comfy_nodes.sampling import common_ksampler
from tests.support.golden_nets import GoldenNet, assert_close_to_golden, read_golden_net


def golden(folder: Path, name: str) -> GoldenNet:
    return read_golden_net(folder / f"nets/{name}.safetensors")


def in_diffusers(weights: dict[str, Tensor], names: dict[str, Any]) -> dict[str, Tensor]:
    """Our weights under the library's names; those without one keep their own."""
    made, used = {}, set()
    for theirs, target in names.items():
        name = target if isinstance(target, str) else target[0]
        if name not in weights:
            continue
        used.add(name)
        value = weights[name]
        if not isinstance(target, str) and len(target) == 3:
            value = torch.cat(list(reversed(value.chunk(2))))
        elif not isinstance(target, str):
            _, start, length = target[1]
            end = min(start + length, value.shape[0])
            value = value[start:end]
        made[theirs] = value.clone()
    return {**{k: v for k, v in weights.items() if k not in used}, **made}


@torch.inference_mode()
def test_the_union_network_of_flux_agrees_with_the_reference(golden_folder: Path) -> None:
    net = golden(golden_folder, "controlnet_flux_union")
    network = ControlNetFlux(**net.constructor).eval()
    network.load_state_dict(net.weights)
    given = {k: net.inputs[k] for k in ("x", "context", "y", "guidance", "hint")}
    out = network(timesteps=net.inputs["t"], control_type=[1], **given)
    assert (len(out["input"]), len(out["output"])) == (19, 38)
    for part, residuals in out.items():
        for number, residual in enumerate(residuals):
            assert_close_to_golden(residual, net.outputs[f"{part}/{number}"])


@torch.inference_mode()
def test_the_network_of_sd3_agrees_with_the_reference(golden_folder: Path) -> None:
    net = golden(golden_folder, "controlnet_sd3")
    network = SD3ControlNet(**net.constructor).eval()
    network.load_state_dict(net.weights)
    given = {k: net.inputs[k] for k in ("x", "context", "y", "hint")}
    out = network(timesteps=net.inputs["t"], **given)["output"]
    recorded = [net.outputs[key] for key in sorted(net.outputs) if key.startswith("output/")]
    assert len(out) == len(recorded)
    for residual, expected in zip(out, recorded):
        assert_close_to_golden(residual, expected)


def test_sd3_residuals_reach_every_block_but_the_last() -> None:
    sizes: dict[str, Any] = {
        "in_channels": 4,
        "depth": 6,
        "num_blocks": 2,
        "num_patches": 16,
        "pos_embed_max_size": 4,
        "context_embedder_config": {"params": {"in_features": 8, "out_features": 384}},
    }
    network = SD3ControlNet(**sizes).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    torch.nn.init.normal_(network.pos_embed)
    latent = torch.rand(1, 4, 8, 8)
    with torch.inference_mode():
        out = network(latent, torch.tensor([500.0]), None, torch.rand(1, 3, 8), latent)["output"]
    assert len(out) == 5
    assert torch.equal(out[0], out[2])
    assert not torch.equal(out[2], out[3])


class HintVAE:
    """The mean of 8 x 8 pixels in 16 channels (or another number)."""

    def __init__(self, channels: int) -> None:
        self.channels = channels

    def spacial_compression_encode(self) -> int:
        return 8

    def encode(self, pixels: Tensor) -> Tensor:
        mean = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), 8)
        return mean.mean(dim=1, keepdim=True).expand(-1, self.channels, -1, -1)


def flux_file(folder: Path, golden_folder: Path) -> tuple[str, GoldenNet]:
    """The recorded union network under the library's names."""
    net = golden(golden_folder, "controlnet_flux_union")
    sizes = {"depth": 1, "depth_single_blocks": 2, "hidden_size": 32}
    path = folder / "union.safetensors"
    save_file(in_diffusers(net.weights, flux_to_diffusers(sizes)), path)
    return str(path), net


@torch.inference_mode()
def test_a_union_file_is_loaded_told_its_kind_and_controls_a_run(
    golden_folder: Path, tmp_path: Path
) -> None:
    path, net = flux_file(tmp_path, golden_folder)
    control = load_controlnet(path)
    assert isinstance(control, ControlNet)
    assert control.control_model.latent_input
    assert control.latent_format is not None
    main = golden(golden_folder, "flux")
    file = tmp_path / "flux.safetensors"
    save_file({k: v.contiguous() for k, v in main.weights.items()}, file)
    model = loading.load_diffusion_model(str(file))
    model.model.latent_format.latent_channels = 4  # as the recorded network has them
    options = {"pooled_output": net.inputs["y"][:1]}
    cond = [[net.inputs["context"][:1], options]]
    latent = {"samples": torch.zeros(1, 4, 8, 6)}

    def run(kind: str | None, strength: float = 1.0) -> Tensor:
        chosen = cond
        if kind is not None:
            told = SetUnionControlNetType.execute(control, kind)[0]
            image = torch.rand(1, 64, 48, 3, generator=torch.Generator().manual_seed(1))
            apply = ControlNetApplyAdvanced().apply_controlnet
            chosen = apply(cond, cond, told, image, strength, 0.0, 1.0, vae=HintVAE(4))[0]
        steps = (model, 3, 2, 1.0, "euler", "simple")
        return common_ksampler(*steps, chosen, cond, latent)[0]["samples"]

    plain = run(None)
    first, second = run("openpose"), run("depth")
    assert not torch.allclose(plain, first)
    assert not torch.allclose(first, second)
    assert torch.equal(run("openpose"), first)
    assert torch.equal(run("openpose", 0.0), plain)


def test_a_hint_latent_needs_an_autoencoder(golden_folder: Path, tmp_path: Path) -> None:
    control = load_controlnet(flux_file(tmp_path, golden_folder)[0])
    control.set_cond_hint(torch.rand(1, 3, 64, 48))
    with pytest.raises(ValueError, match="needs a VAE"):
        control._hint_for(torch.zeros(1, 4, 8, 6), torch.float32)  # type: ignore[attr-defined]


@torch.inference_mode()
def test_a_picture_hint_is_brought_to_the_latents_size(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "in_channels": 16, "out_channels": 16, "vec_in_dim": 12, "context_in_dim": 20,
        "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2,
        "depth_single_blocks": 0, "axes_dim": [4, 6, 6], "theta": 10000, "patch_size": 2,
        "qkv_bias": True, "guidance_embed": True,
    }  # fmt: skip
    network = ControlNetFlux(**sizes).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    path = tmp_path / "xlabs.safetensors"
    save_file(network.state_dict(), path)
    control = load_controlnet(str(path))
    assert isinstance(control, ControlNet)
    assert control.compression_ratio == 8
    latent, picture = torch.rand(1, 16, 4, 6), torch.rand(1, 3, 32, 48)
    given = (latent, torch.tensor([0.5]), torch.rand(1, 3, 20), torch.rand(1, 12))
    out = control.control_model(*given, torch.tensor([3.5]), picture)
    assert list(out) == ["input"]
    # Few residuals of a picture are gone through again and again.
    assert torch.equal(out["input"][0], out["input"][2])
    assert not torch.equal(out["input"][0], out["input"][1])
    assert torch.equal(out["input"][0], network(*given, torch.tensor([3.5]), picture)["input"][0])


@pytest.mark.parametrize("name", ["flux", "flux_schnell", "sd3_mmdit", "sd35_medium_mmdit"])
@torch.inference_mode()
def test_networks_under_the_librarys_names_are_the_same(
    name: str, golden_folder: Path, tmp_path: Path
) -> None:
    net = golden(golden_folder, name)
    names: Callable[[dict[str, Any]], dict[str, Any]] = mmdit_to_diffusers
    sizes: dict[str, Any] = {"depth": 1, "num_blocks": 2}
    if name.startswith("flux"):
        names = flux_to_diffusers
        sizes = {"depth": 1, "depth_single_blocks": 2, "hidden_size": 32}
    theirs = in_diffusers(net.weights, names(sizes))
    ours = convert_diffusers_mmdit(theirs)
    assert ours is not None
    assert ours.keys() == net.weights.keys()
    assert all(torch.equal(ours[key], net.weights[key]) for key in ours)
    path = tmp_path / "transformer.safetensors"
    save_file(theirs, path)
    model = loading.load_diffusion_model(str(path)).model.diffusion_model
    args = {k: v for k, v in net.inputs.items() if k in ("context", "y", "guidance")}
    assert_close_to_golden(model(net.inputs["x"], net.inputs["t"], **args), net.outputs["out"])


def test_other_files_have_no_names_of_the_library() -> None:
    assert convert_diffusers_mmdit({"input_blocks.0.0.weight": torch.zeros(1)}) is None
