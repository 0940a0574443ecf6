"""The layout reader recovers the whole configuration of every recorded UNet from keys and
shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comfy.families.family import BrokenModelError
from comfy.families.unet_layout import count_consecutive, read_unet_config
from comfy.ldm.unet.model import UNetModel
from tests.comfy.families import key_shapes

UNETS = [
    "SD1.5",
    "SD1.5 inpaint",
    "SD1.5 instruct-pix2pix",
    "Stable Zero123",
    "SD2.x 768/512",
    "SD2 inpaint",
    "SD2.1 unCLIP-L",
    "SD2.1 unCLIP-H",
    "Lotus-D",
    "SD x4 upscaler",
    "SDXL base",
    "SDXL inpaint",
    "SDXL instruct-pix2pix",
    "SDXL refiner",
    "SSD-1B",
    "Segmind Vega",
    "KOALA 700M",
    "KOALA 1B",
    "SVD img2vid",
    "SV3D u",
    "SV3D p",
]


@pytest.mark.parametrize("name", UNETS)
def test_the_configuration_is_read_from_keys_and_shapes(
    name: str, golden_folder: Path, golden_json: Callable[[str], Any]
) -> None:
    expected = golden_json("model_families.json")["variants"][name]["detected_unet_config"]
    state_dict = key_shapes.network(golden_folder, name, "model.diffusion_model.")
    assert read_unet_config(state_dict, "model.diffusion_model.") == expected


@pytest.mark.parametrize(
    "name", ["SD1.5", "SD2.x 768/512", "SDXL base", "SDXL refiner", "KOALA 1B"]
)
def test_a_network_built_from_the_configuration_has_exactly_the_recorded_weights(
    name: str, golden_folder: Path
) -> None:
    state_dict = key_shapes.network(golden_folder, name)
    config = read_unet_config(state_dict)
    assert config is not None
    network = UNetModel(**config, num_head_channels=64, device="meta")
    built = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    assert built == {key: tuple(value.shape) for key, value in state_dict.items()}


def test_another_layout_is_not_recognised() -> None:
    state_dict = {"double_blocks.0.img_attn.qkv.weight": torch.empty(9, 3, device="meta")}
    assert read_unet_config(state_dict) is None


@pytest.mark.parametrize(
    "missing",
    [
        "input_blocks.1.0.out_layers.3.weight",
        "input_blocks.1.1.proj_in.weight",
        "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight",
    ],
)
def test_a_missing_decisive_weight_is_named(missing: str, golden_folder: Path) -> None:
    state_dict = key_shapes.network(golden_folder, "SD1.5", "unet.")
    del state_dict[f"unet.{missing}"]
    with pytest.raises(BrokenModelError, match=f"unet.{missing}"):
        read_unet_config(state_dict, "unet.")


def test_channels_that_are_no_multiple_are_named_with_both_numbers(golden_folder: Path) -> None:
    state_dict = key_shapes.network(golden_folder, "SD1.5")
    state_dict["input_blocks.0.0.weight"] = torch.empty(300, 4, 3, 3, device="meta")
    with pytest.raises(BrokenModelError, match=r"320 output channels.*300 channels"):
        read_unet_config(state_dict)


def test_counting_stops_at_the_first_gap() -> None:
    keys = ["a.0.x", "a.1.y", "a.3.z", "b.0.x"]
    assert count_consecutive(keys, "a.") == 2
    assert count_consecutive(keys, "c.") == 0
