"""Mixing models and saving what came out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import folder_paths
from comfy import loading, text_loading
from comfy.devices import residency
from comfy.weights.state_dict import load_torch_file
from comfy_extras import nodes_model_merging as nodes
from tests.support import tiny_checkpoint

KEY = "diffusion_model.input_blocks.0.0.weight"
MIDDLE = "diffusion_model.middle_block.0.in_layers.2.weight"


@pytest.fixture
def pair(tmp_path: Path) -> list[loading.Checkpoint]:
    parts = []
    for seed in (1, 2):
        path = tiny_checkpoint.write(
            tmp_path / f"{seed}.safetensors", tiny_checkpoint.weights(seed=seed)
        )
        parts.append(loading.load_checkpoint_guess_config(str(path)))
    return parts


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Path]:
    before = folder_paths.get_output_directory()
    folder_paths.set_output_directory(str(tmp_path / "output"))
    yield tmp_path / "output"
    folder_paths.set_output_directory(before)


def weight(view: Any, key: str) -> Tensor:
    """The weight as the view's patches make it; the base model is as before afterwards."""
    residency.load_models_gpu([view], force_patch_weights=True)
    value = view.model.state_dict()[key].clone()
    residency.unload_all_models()
    return value


def test_models_are_mixed_in_proportion(pair: list[loading.Checkpoint]) -> None:
    first, second = (parts.model for parts in pair)
    a, b = weight(first, KEY), weight(second, KEY)
    mixed = nodes.ModelMergeSimple().merge(first, second, 0.25)[0]
    torch.testing.assert_close(weight(mixed, KEY), 0.25 * a + 0.75 * b)
    added = nodes.ModelAdd().merge(first, second)[0]
    torch.testing.assert_close(weight(added, KEY), a + b)
    difference = nodes.ModelSubtract().merge(first, second, 2.0)[0]
    torch.testing.assert_close(weight(difference, KEY), 2 * a - 2 * b)
    assert torch.equal(weight(first, KEY), a)


def test_parts_of_models_are_mixed_by_the_longest_name(pair: list[loading.Checkpoint]) -> None:
    first, second = (parts.model for parts in pair)
    mixed = nodes.ModelMergeBlocks().merge(first, second, input=1.0, middle=0.0, out=0.5)[0]
    assert torch.equal(weight(mixed, KEY), weight(first, KEY))
    torch.testing.assert_close(weight(mixed, MIDDLE), weight(second, MIDDLE))


def test_mixing_lists_the_keys_of_a_model_however_many_there_are_twice_at_most(
    pair: list[loading.Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (parts.model for parts in pair)
    listed = []
    list_tensors = nn.Module.state_dict

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        listed.append(self)
        return list_tensors(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "state_dict", counted)
    mixed = nodes.ModelMergeBlocks().merge(first, second, input=0.25, middle=0.5, out=0.75)[0]
    assert len(mixed.patches) > 100
    for model in (first, second):  # to find what they share, and to measure one of them
        assert listed.count(model.model) in (1, 2)


def test_a_saved_checkpoint_holds_the_mixed_weights_and_loads_again(
    pair: list[loading.Checkpoint], output: Path
) -> None:
    first, second = pair
    mixed = nodes.ModelMergeSimple().merge(first.model, second.model, 0.5)[0]
    expected = weight(mixed, KEY)
    save = nodes.CheckpointSave().save
    save(mixed, first.clip, first.vae, "checkpoints/mix", {"1": {}}, {"workflow": {}})
    path = output / "checkpoints" / "mix_00001_.safetensors"
    tensors, metadata = load_torch_file(str(path), return_metadata=True)
    assert metadata["modelspec.title"] == "checkpoints/mix 1"
    assert metadata["prompt"] == '{"1": {}}'
    key = "model." + KEY
    torch.testing.assert_close(tensors[key], expected)
    assert set(tiny_checkpoint.weights()) <= set(tensors)
    again = loading.load_checkpoint_guess_config(str(path))
    # The counts that shapes do not tell came back too.
    for name, count in (("num_heads", 2), ("norm_num_groups", 4)):
        assert again.model.model.model_config.unet_config[name] == count
    latent = torch.ones(1, 4, 4, 4)
    assert torch.equal(again.vae.decode(latent), first.vae.decode(latent))
    tokens = first.clip.tokenize("a cat")
    texts = [parts.clip.encode_from_tokens(tokens) for parts in (again, first)]
    assert torch.equal(*texts)


def test_a_saved_text_encoder_and_autoencoder_load_alone(
    pair: list[loading.Checkpoint], output: Path
) -> None:
    _, clip, vae, _ = pair[0]
    nodes.CLIPSave().save(clip, "clip/x")
    nodes.VAESave().save(vae, "vae/x")
    text = text_loading.load_clip([str(output / "clip" / "x_00001_.safetensors")])
    tokens = clip.tokenize("a cat")
    assert torch.equal(text.encode_from_tokens(tokens), clip.encode_from_tokens(tokens))
    tensors = load_torch_file(str(output / "vae" / "x_00001_.safetensors"))
    assert tensors.keys() == vae.get_sd().keys()
