"""What the tests of Wan's kinds with networks of their own share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import folder_paths
from comfy import loading
from comfy.devices import residency
from comfy.families.wan_layout import read_wan_config
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.patcher import ModelPatcher
from comfy_nodes import loaders
from tests.comfy.families import key_shapes
from tests.comfy.families.test_wan import HEADS, sampled
from tests.comfy.patching.test_packs_sampling import close
from tests.support.accelerator import assert_untouched, bytes_of, snapshot

PATCHERS = [ModelPatcher, ModelPatcherDynamic]
Given = tuple[Any, Any, Tensor]
"""Conditioning, positive and negative, and a latent."""


def noise(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def load(folder: Path, weights: Mapping[str, Tensor]) -> Any:
    """A model of weights, by way of a file."""
    path = folder / "small.safetensors"
    save_file({k: v.contiguous() for k, v in weights.items()}, path, metadata=HEADS)
    return loading.load_diffusion_model(str(path))


def assert_a_place_for_every_key(
    golden_folder: Path, name: str, kind: type[nn.Module], usual: set[str]
) -> nn.Module:
    """A published network has the keys and shapes of ours, which needs be told nothing usual."""
    recorded = key_shapes.network(golden_folder, name)
    config = read_wan_config(recorded)
    assert config is not None
    assert not usual & config.keys()
    network = kind(**config, device="meta")
    own = network.state_dict()
    assert {k: v.shape for k, v in own.items()} == {k: v.shape for k, v in recorded.items()}
    return network


def assert_the_same_on_a_small_device(
    found: Any, kind: type[ModelPatcher], accelerator: Any, given: Given
) -> None:
    """Streaming a third of the weights changes nothing of a video and nothing of the model."""
    before = snapshot(found.model)

    def made() -> Tensor:
        residency.unload_all_models()
        view = kind(found.model, torch.device(f"{accelerator.NAME}:0"), found.offload_device)
        return sampled(view, *given)

    want = made()
    peak = torch.accelerator.max_memory_allocated(0)
    accelerator.set_capacity(int(peak - 0.3 * bytes_of(found.model)), 0)
    assert close(made(), want)
    residency.unload_all_models()
    assert_untouched(found.model, before)


def assert_a_lora_changes_a_view(
    model: Any,
    key: str,
    shape: tuple[int, int],
    given: Given,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the weight of a key, with rows and columns as `shape` has them."""
    entry = ([str(folder)], folder_paths.supported_pt_extensions)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "loras", entry)
    up, down = noise(shape[0], 2), noise(2, shape[1])
    save_file({f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}, folder / "l.safetensors")
    view, _ = loaders.LoraLoader().load_lora(model, None, "l.safetensors", 1.0, 1.0)
    assert not torch.allclose(sampled(model, *given), sampled(view, *given))
