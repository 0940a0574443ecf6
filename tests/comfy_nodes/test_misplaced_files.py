"""A file in the folder of another kind is refused by its name, whatever its keys and values are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import folder_paths
from comfy import clip_vision, latent_upscaling, loading, style_model, text_loading
from comfy.audio_encoders import audio_encoders
from comfy.control.loading import load_controlnet
from comfy.weights.errors import WeightFileError
from comfy_extras.nodes_hypernetwork import load_hypernetwork_patch
from comfy_extras.nodes_model_patch import ModelPatchLoader
from comfy_extras.nodes_photomaker import load_id_encoder
from comfy_extras.upscaling import load_network
from comfy_nodes.loaders import LoraLoader, VAELoader
from comfy_nodes.vision import GLIGENLoader
from tests.support.golden_nets import read_golden_net


def from_any_folder(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """A node's loading by name, where every name is a path."""

    def loaded(path: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(folder_paths, "get_full_path_or_raise", lambda _folder, name: name)
            return load(path)

    return loaded


LOADERS: dict[str, Callable[[str], Any]] = {
    "checkpoint": loading.load_checkpoint_guess_config,
    "diffusion model": loading.load_diffusion_model,
    "text encoder": lambda path: text_loading.load_clip([path]),
    "autoencoder": from_any_folder(VAELoader().load_vae),
    "control network": load_controlnet,
    "image encoder": clip_vision.load,
    "GLIGEN": from_any_folder(GLIGENLoader().load_gligen),
    "style model": style_model.load_style_model,
    "PhotoMaker": load_id_encoder,
    "hypernetwork": lambda path: load_hypernetwork_patch(path, 1.0),
    "upscale model": load_network,
    "latent upscale model": latent_upscaling.load,
    "audio encoder": audio_encoders.load,
    "model patch": from_any_folder(ModelPatchLoader().load_model_patch),
    "LoRA": from_any_folder(lambda path: LoraLoader().load_lora(None, None, path, 1.0, 1.0)),
}
STACK = {"linear.0.weight": torch.zeros(4, 2)}
FILES: dict[str, Any] = {
    "of a hypernetwork": {320: [STACK, STACK], 640: [STACK, STACK], "layer_structure": [1, 2, 1]},
    "of nested dicts": {"id": {"a.weight": torch.zeros(1)}, "rest": {"b.weight": torch.zeros(1)}},
    "of other things": {"epoch": 3, "words": ["a"], "none": None},
    "of nothing": {},
}


@pytest.mark.parametrize("content", FILES)
@pytest.mark.parametrize("loader", LOADERS)
def test_a_pickled_file_of_another_kind_is_refused_by_name(
    loader: str, content: str, tmp_path: Path
) -> None:
    if loader == "hypernetwork" and "hypernetwork" in content:
        pytest.skip("the right folder")
    torch.save(FILES[content], tmp_path / "of another kind.pt")
    with pytest.raises(WeightFileError, match=r"of another kind\.pt: .*To mend it"):
        LOADERS[loader](str(tmp_path / "of another kind.pt"))


def test_a_control_network_that_is_not_whole_names_its_file(
    golden_folder: Path, tmp_path: Path
) -> None:
    net = read_golden_net(golden_folder / "nets/controlnet_sd1.safetensors")
    weights = {key: value.contiguous() for key, value in net.weights.items()}
    del weights["middle_block_out.0.weight"]
    save_file(weights, tmp_path / "cut.safetensors")
    with pytest.raises(
        WeightFileError, match=r"cut\.safetensors: .*lacks 1 key \(middle_block_out"
    ):
        load_controlnet(str(tmp_path / "cut.safetensors"))
