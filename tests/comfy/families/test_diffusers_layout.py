"""UNet files under the names of the diffusers library are recognised and renamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy import loading
from comfy.families import detection, diffusers_layout
from comfy.families.family import BrokenModelError
from comfy.families.unet_layout import read_unet_config
from comfy.weights.diffusers_unet import unet_to_diffusers
from tests.comfy.families import key_shapes
from tests.support import tiny_checkpoint

NAMES = [
    "SD1.5",
    "SD1.5 inpaint",
    "SD2.x 768/512",
    "SDXL base",
    "SDXL refiner",
    "SSD-1B",
    "Segmind Vega",
    "KOALA 700M",
    "KOALA 1B",
]


def as_diffusers(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same weights under the other names."""
    names = {
        ours: theirs for theirs, ours in unet_to_diffusers(read_unet_config(state_dict)).items()
    }
    return {names.get(key, key): value for key, value in state_dict.items()}


@pytest.mark.parametrize("name", NAMES)
def test_full_size_networks(
    name: str, golden_folder: Path, golden_json: Callable[[str], Any]
) -> None:
    native = key_shapes.network(golden_folder, name)
    other = as_diffusers(native)
    assert not any(key.startswith(("input_blocks.", "output_blocks.")) for key in other)
    config = diffusers_layout.read_config(other)
    assert config == read_unet_config(native)
    renamed = diffusers_layout.to_native(other, config)
    assert {k: v.shape for k, v in renamed.items()} == {k: v.shape for k, v in native.items()}
    family = detection.model_config_from_unet_config(config)
    recorded = golden_json("diffusers_unet_detection.json")[name]
    assert type(family).__name__ == recorded["detected_class"]
    for key in ("transformer_depth", "num_res_blocks", "adm_in_channels", "context_dim"):
        assert config[key] == recorded["resulting_unet_config"][key]


def test_a_file_loads_to_the_same_network_as_its_original() -> None:
    prefix = "model.diffusion_model."
    weights = tiny_checkpoint.weights()
    native = {key[len(prefix) :]: weights[key] for key in weights if key.startswith(prefix)}
    model = loading.load_diffusion_model_state_dict(
        as_diffusers(native), metadata=tiny_checkpoint.HEADER
    )
    assert model is not None
    loaded = model.model.diffusion_model.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in native.items())


def test_a_missing_decisive_weight_is_named(golden_folder: Path) -> None:
    other = as_diffusers(key_shapes.network(golden_folder, "SD1.5"))
    del other["conv_out.weight"]
    with pytest.raises(BrokenModelError, match=r"conv_out\.weight"):
        diffusers_layout.read_config(other)


def test_another_layout_is_not_recognised(golden_folder: Path) -> None:
    assert diffusers_layout.read_config(key_shapes.network(golden_folder, "SD1.5")) is None
