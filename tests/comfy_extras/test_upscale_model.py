"""Pictures enlarged by networks made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from comfy.weights.errors import WeightFileError
from comfy_extras import nodes_upscale_model, upscaling
from comfy_extras.chainner_models.model_loading import load_state_dict


def compact(scale: int = 2) -> dict[str, Tensor]:
    """Weights of a small SRVGGNetCompact, one of the architectures with the fewest layers."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"body.0": (8, 3, 3, 3), "body.2": (8, 8, 3, 3), "body.4": (3 * scale**2, 8, 3, 3)}
    made: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        made[f"{name}.weight"] = torch.randn(shape, generator=generator) * 0.1
        made[f"{name}.bias"] = torch.zeros(shape[0])
    made["body.1.weight"] = made["body.3.weight"] = torch.full((8,), 0.2)
    return made


def test_the_architecture_is_told_by_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "x2.safetensors"
    save_file({f"module.{key}": value.clone() for key, value in compact().items()}, path)
    network = upscaling.load_network(str(path))
    assert network.scale == 2
    image = torch.rand(2, 10, 12, 4)
    made = nodes_upscale_model.ImageUpscaleWithModel().upscale(network, image)[0]
    assert made.shape == (2, 20, 24, 3)
    assert made.min() >= 0
    assert made.max() <= 1
    assert load_state_dict(compact()).scale == 2


def test_other_files_are_refused_with_what_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "lora.safetensors"
    save_file({"a.lora_up.weight": torch.zeros(1)}, path)
    with pytest.raises(WeightFileError, match=r"lora\.safetensors: no known architecture.*ESRGAN"):
        upscaling.load_network(str(path))


class Repeat(nn.Module):
    """Every pixel four times; runs out of memory on large tiles."""

    scale = 2
    largest = 10_000

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Identity()
        self.sides: list[int] = []

    def forward(self, tile: Tensor) -> Tensor:
        self.sides.append(tile.shape[-1])
        if tile.shape[-1] > self.largest:
            raise torch.OutOfMemoryError("too large")
        return tile.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


def test_tiles_make_the_same_picture_as_the_whole() -> None:
    image = torch.rand(1, 300, 600, 3)
    network: Any = Repeat()
    made = upscaling.enlarge(network, image)
    assert len(network.sides) > 1
    whole = image.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
    assert (made - whole).abs().max() < 1e-6


def test_tiles_get_smaller_when_memory_runs_short() -> None:
    network: Any = Repeat()
    network.largest = 300
    image = torch.rand(1, 300, 400, 3)
    assert upscaling.enlarge(network, image).shape == (1, 600, 800, 3)
    assert max(network.sides) > 300
    network.largest = 20
    with pytest.raises(torch.OutOfMemoryError):
        upscaling.enlarge(network, image)


def test_grey_is_enlarged_as_the_same_value_in_all_colours() -> None:
    grey, network = torch.rand(1, 9, 7, 1), Repeat()
    expected = upscaling.enlarge(network, grey.repeat(1, 1, 1, 3))
    assert torch.equal(upscaling.enlarge(network, grey), expected)
