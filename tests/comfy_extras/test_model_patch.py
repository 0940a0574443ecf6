"""Networks that act inside a diffusion model: the style projector of USO in FLUX."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import folder_paths
from comfy import loading
from comfy.ldm.flux.uso import SigLIPMultiFeatProjModel
from comfy.weights.errors import WeightFileError
from comfy_extras.nodes_model_patch import ModelPatchLoader, USOStyleReference
from comfy_nodes.sampling import common_ksampler
from tests.support.golden_nets import read_golden_net


@pytest.fixture
def patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of model patches of this test."""
    entry = ([str(tmp_path)], {".safetensors"})
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "model_patches", entry)
    return tmp_path


def projector() -> SigLIPMultiFeatProjModel:
    torch.manual_seed(2)
    network = SigLIPMultiFeatProjModel(9, 2, 16, 32)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    return network


@torch.inference_mode()
def test_every_layer_gives_its_tokens_the_highest_first() -> None:
    network = projector()
    states = torch.rand(3, 1, 9, 16)
    tokens = network(states)
    assert tokens.shape == (1, 6, 32)
    changed = states.clone()
    changed[2] += 1.0
    difference = (network(changed) - tokens).abs().sum(dim=-1)[0]
    assert difference[:2].min() > 0
    assert difference[2:].max() == 0


@torch.inference_mode()
def test_a_pictures_style_reaches_the_text_of_flux(patches: Path, golden_folder: Path) -> None:
    weights = {f"feature_embedder.{k}": v for k, v in projector().state_dict().items()}
    save_file(weights, patches / "uso.safetensors")
    patch = ModelPatchLoader().load_model_patch("uso.safetensors")[0]
    net = read_golden_net(golden_folder / "nets/flux.safetensors")
    file = patches / "flux.safetensors"
    save_file({key: value.contiguous() for key, value in net.weights.items()}, file)
    model = loading.load_diffusion_model(str(file))
    model.model.latent_format.latent_channels = 4  # as the recorded network has them
    seen = SimpleNamespace(
        all_hidden_states=torch.rand(1, 27, 9, 16),
        penultimate_hidden_states=torch.rand(1, 9, 16),
    )
    view = USOStyleReference().apply_patch(model, patch, seen)[0]
    cond = [[net.inputs["context"][:1], {"pooled_output": net.inputs["y"][:1]}]]
    latent = {"samples": torch.zeros(2, 4, 8, 8)}

    def run(chosen: Any) -> Tensor:
        out = common_ksampler(chosen, 3, 2, 1.0, "euler", "simple", cond, cond, latent)
        return out[0]["samples"]

    plain = run(model)
    assert not torch.allclose(run(view), plain)
    assert torch.equal(run(model), plain)


def test_another_image_encoder_is_refused(patches: Path) -> None:
    del patches
    seen = SimpleNamespace(penultimate_hidden_states=torch.rand(1, 9, 16))
    with pytest.raises(ValueError, match="SigLIP"):
        USOStyleReference().apply_patch(None, None, seen)


def test_other_networks_are_told_by_what_they_hold(patches: Path) -> None:
    save_file({"something.weight": torch.zeros(1)}, patches / "other.safetensors")
    with pytest.raises(WeightFileError, match=r"no known model patch: found 1 key \(something"):
        ModelPatchLoader().load_model_patch("other.safetensors")


@pytest.mark.parametrize(
    "key", ["controlnet_blocks.0.y_rms.weight", "control_all_x_embedder.2-1.weight"]
)
def test_a_part_that_is_missing_is_named(key: str, patches: Path) -> None:
    save_file({key: torch.zeros(2, 4)}, patches / "cut.safetensors")
    with pytest.raises(WeightFileError, match=r"(img_in|control_layers).*fetch the file again"):
        ModelPatchLoader().load_model_patch("cut.safetensors")
