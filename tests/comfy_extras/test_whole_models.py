"""Nodes on whole models: folders of the diffusers library, extracted LoRAs, hypernetworks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import comfyui_version
import folder_paths
from comfy import loading
from comfy.families.unet_layout import convert_config
from comfy.k_diffusion.utils import FolderOfImages
from comfy.weights.state_dict import load_torch_file
from comfy_extras import nodes_hypernetwork
from comfy_extras.nodes_lora_extract import LoraSave
from comfy_extras.nodes_model_merging import ModelSubtract
from comfy_nodes.sampling import common_ksampler
from comfy_nodes.special_loaders import DiffusersLoader
from comfy_server.routes.system import INTERFACE_VERSION
from tests.comfy.families.test_diffusers_layout import as_diffusers
from tests.comfy_extras.test_small_networks import hypernetwork_file
from tests.support import tiny_checkpoint

UNET = "model.diffusion_model."
TEXT = "cond_stage_model.transformer."
VAE = "first_stage_model."


def part(prefix: str) -> dict[str, Tensor]:
    weights = tiny_checkpoint.weights()
    return {k[len(prefix) :]: v for k, v in weights.items() if k.startswith(prefix)}


def checkpoint(folder: Path, seed: int) -> loading.Checkpoint:
    weights = tiny_checkpoint.weights(seed=seed)
    path = tiny_checkpoint.write(folder / f"{seed}.safetensors", weights)
    return loading.load_checkpoint_guess_config(str(path))


def sampled(model: Any, clip: Any) -> Tensor:
    cond = clip.encode_from_tokens_scheduled(clip.tokenize("a red circle"))
    latent = {"samples": torch.zeros(1, 4, 8, 8)}
    out = common_ksampler(model, 5, 2, 1.0, "euler", "normal", cond, cond, latent)
    return out[0]["samples"]


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folders of models and outputs of this test."""
    for name in ("diffusers", "hypernetworks"):
        (tmp_path / name).mkdir()
        entry = ([str(tmp_path / name)], {".pt", "folder"})
        monkeypatch.setitem(folder_paths.folder_names_and_paths, name, entry)
    before = folder_paths.get_output_directory()
    folder_paths.set_output_directory(str(tmp_path / "output"))
    yield tmp_path
    folder_paths.set_output_directory(before)


def test_a_folder_of_the_library_is_the_same_model_as_the_checkpoint(folders: Path) -> None:
    root = folders / "diffusers/some/model"
    files = {
        "unet/diffusion_pytorch_model.safetensors": as_diffusers(part(UNET)),
        "text_encoder/model.safetensors": part(TEXT),
        "vae/diffusion_pytorch_model.fp16.safetensors": part(VAE),
    }
    for name, tensors in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        whole = {key: value.contiguous() for key, value in tensors.items()}
        save_file(whole, root / name, tiny_checkpoint.HEADER)
    (root / "model_index.json").write_text("{}", encoding="utf-8")
    names = DiffusersLoader.INPUT_TYPES()["required"]["model_path"][0]
    assert names == ["some/model"]
    model, clip, vae = DiffusersLoader().load_checkpoint("some/model")
    whole_file = tiny_checkpoint.write(folders / "whole.safetensors")
    expected = loading.load_checkpoint_guess_config(str(whole_file))
    latent = sampled(model, clip)
    assert torch.equal(latent, sampled(expected.model, expected.clip))
    assert expected.vae is not None
    assert torch.equal(vae.decode(latent), expected.vae.decode(latent))


@pytest.mark.parametrize("name", ["..", "absent", "some", "/etc"])
def test_only_folders_with_an_index_are_models(name: str, folders: Path) -> None:
    (folders / "diffusers/some").mkdir()
    with pytest.raises(FileNotFoundError, match=r"model_index\.json"):
        DiffusersLoader().load_checkpoint(name)


def test_a_part_that_is_not_there_is_named(folders: Path) -> None:
    (folders / "diffusers/bare").mkdir()
    (folders / "diffusers/bare/model_index.json").write_text("{}", encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"bare/unet: holds none of diffusion_pytorch"):
        DiffusersLoader().load_checkpoint("bare")


@pytest.mark.parametrize("lora_type", ["standard", "full_diff"])
def test_a_saved_difference_makes_one_model_the_other(lora_type: str, folders: Path) -> None:
    first, second = checkpoint(folders, 1), checkpoint(folders, 2)
    wanted = sampled(first.model, first.clip)
    assert not torch.allclose(sampled(second.model, first.clip), wanted)
    difference = ModelSubtract().merge(first.model, second.model, 1.0)[0]
    LoraSave.execute("loras/extracted", 4096, lora_type, True, difference)
    (saved,) = (folders / "output/loras").iterdir()
    lora = load_torch_file(str(saved))
    assert {value.dtype for value in lora.values()} == {torch.float16}
    assert any(key.endswith(".diff_b") for key in lora)
    view, _ = loading.load_lora_for_models(second.model, None, lora, 1.0, 0.0)
    # Half precision in the file is all that is lost.
    assert (sampled(view, first.clip) - wanted).std() < 0.02 * wanted.std()


def test_without_biases_and_with_a_low_rank_less_is_saved(folders: Path) -> None:
    first, second = checkpoint(folders, 1), checkpoint(folders, 2)
    difference = ModelSubtract().merge(first.model, second.model, 1.0)[0]
    LoraSave.execute("low", 2, "standard", False, difference)
    (saved,) = (folders / "output").iterdir()
    lora = load_torch_file(str(saved))
    assert not [key for key in lora if key.endswith((".diff", ".diff_b"))]
    assert max(value.shape[0] for key, value in lora.items() if "lora_down" in key) == 2


def test_a_hypernetwork_acts_on_a_view_only(folders: Path) -> None:
    parts = checkpoint(folders, 1)
    hypernetwork_file(folders / "hypernetworks/h.pt")
    stack = nodes_hypernetwork.load_hypernetwork_patch(str(folders / "hypernetworks/h.pt"), 1.0)
    stack.stacks = {32: stack.stacks[8]}  # the width of this model's text
    plain = sampled(parts.model, parts.clip)
    view = nodes_hypernetwork.HypernetworkLoader.execute(parts.model, "h.pt", 1.0)[0]
    assert torch.equal(sampled(view, parts.clip), plain)  # no layer here is 8 wide
    assert torch.equal(sampled(parts.model, parts.clip), plain)


def test_packs_read_the_version_the_server_tells() -> None:
    assert comfyui_version.__version__ == INTERFACE_VERSION


def test_old_configurations_are_read() -> None:
    old = {
        "channel_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "attention_resolutions": [4, 2, 1],
        "transformer_depth": 1,
        "model_channels": 320,
    }
    new = convert_config(old)
    assert new["num_res_blocks"] == [2, 2, 2, 2]
    assert new["transformer_depth"] == [1, 1, 1, 1, 1, 1, 0, 0]
    assert new["transformer_depth_output"] == [1] * 9 + [0] * 3
    assert new["transformer_depth_middle"] == 1
    assert "attention_resolutions" not in new
    assert "attention_resolutions" in old


def test_a_folder_of_pictures_is_a_training_set(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    Image.new("RGBA", (3, 2)).save(tmp_path / "below/b.png")
    Image.new("L", (4, 2)).save(tmp_path / "a.JPG", format="jpeg")
    (tmp_path / "notes.txt").write_text("none", encoding="utf-8")
    pictures = FolderOfImages(tmp_path, transform=lambda picture: picture.size)
    assert len(pictures) == 2
    assert [pictures[n] for n in range(2)] == [((4, 2),), ((3, 2),)]
    assert FolderOfImages(tmp_path)[0][0].mode == "RGB"
