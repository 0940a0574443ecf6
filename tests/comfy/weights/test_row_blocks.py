"""Adding plain LoRAs in blocks of rows gives the bits of the arithmetic on whole weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from comfy.patching.patcher import ModelPatcher
from comfy.weights import arithmetic, row_blocks
from comfy.weights.adapters import LoRAAdapter
from comfy.weights.pages import WeightMemory

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "BLOCK_ELEMENTS", 500)


def lora(shape: tuple[int, ...], rank: int = 4, alpha: float | None = 2.0, **parts: Any) -> Any:
    up = torch.randn(shape[0], rank, *(1,) * (len(shape) - 2))
    down = torch.randn(rank, *shape[1:])
    weights = (up, down, alpha, parts.get("mid"), parts.get("dora"), parts.get("reshape"))
    return LoRAAdapter(set(), weights)


def whole(patches: list[Any], weight: torch.Tensor) -> torch.Tensor:
    wide = weight.to(torch.float32, copy=True)
    return arithmetic.calculate_weight(patches, wide, "w").to(weight.dtype)


@pytest.mark.parametrize("dtype", row_blocks.TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (33, 40), (64, 128), (100, 7), (24, 6, 3, 3), (9, 4, 5)])
def test_blocks_give_the_bits_of_the_whole(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.randn(shape).to(dtype)
    before = weight.clone()
    patches = [(0.8, lora(shape), 1.0, None, None), (-1.7, lora(shape, 1, None), 0.6, None, None)]
    got = row_blocks.patched(patches, weight, "w", WeightMemory())
    assert got is not None
    assert torch.equal(got, whole(patches, weight))
    assert torch.equal(weight, before)


@pytest.mark.parametrize("offset", [(0, 0, 10), (0, 17, 31), (0, 50, 50)])
def test_a_slice_of_rows_is_changed_alone(offset: tuple[int, int, int]) -> None:
    weight = torch.randn(100, 30).half()
    patches = [
        (0.5, lora((offset[2], 30)), 0.25, offset, None),
        (1.5, lora((100, 30)), 1.0, None, None),
    ]
    got = row_blocks.patched(patches, weight, "w", WeightMemory())
    assert got is not None
    assert torch.equal(got, whole(patches, weight))


def test_channels_last_weights_keep_their_layout() -> None:
    weight = torch.randn(40, 8, 3, 3).half().contiguous(memory_format=torch.channels_last)
    patches = [(0.7, lora((40, 8, 3, 3)), 1.0, None, None)]
    got = row_blocks.patched(patches, weight, "w", WeightMemory())
    assert got is not None
    assert got.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(got, whole(patches, weight), rtol=1e-3, atol=1e-6)


def test_a_core_is_contracted_into_the_product() -> None:
    weight = torch.randn(24, 6, 3, 3)
    up, down, mid = torch.randn(24, 4, 1, 1), torch.randn(4, 6, 1, 1), torch.randn(4, 4, 3, 3)
    adapter = LoRAAdapter(set(), (up, down, 2.0, mid, None, None))
    patches = [(0.7, adapter, 1.0, None, None)]
    got = row_blocks.patched(patches, weight, "w", WeightMemory())
    assert got is not None
    assert torch.equal(got, whole(patches, weight))


@pytest.mark.parametrize(
    "patch",
    [
        (1.0, ("diff", (torch.ones(6, 5),)), 1.0, None, None),
        (1.0, lora((6, 5), dora=torch.ones(6, 1)), 1.0, None, None),
        (1.0, lora((6, 5), reshape=(8, 5)), 1.0, None, None),
        (1.0, lora((6, 5)), 1.0, None, lambda delta: delta.flip(0)),
        (1.0, lora((6, 2)), 1.0, (1, 0, 2), None),
        (1.0, lora((6, 4)), 1.0, None, None),
        (1.0, LoRAAdapter(set(), (torch.ones(6, 1), *[None] * 5)), 1.0, None, None),
    ],
    ids=["difference", "dora", "grown", "function", "columns", "misfit", "half"],
)
def test_other_changes_are_left_to_the_general_arithmetic(patch: Any) -> None:
    plain = (1.0, lora((6, 5)), 1.0, None, None)
    assert row_blocks.patched([plain, patch], torch.zeros(6, 5), "w", WeightMemory()) is None


def test_float8_is_left_to_the_general_arithmetic() -> None:
    weight = torch.zeros(6, 5).to(torch.float8_e4m3fn)
    assert (
        row_blocks.patched([(1.0, lora((6, 5)), 1.0, None, None)], weight, "w", WeightMemory())
        is None
    )


class Counting(ModelPatcher):
    """A patcher with arithmetic of its own, as packs write them."""

    def calculate_weight(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().calculate_weight(*args, **kwargs) + 1.0


def test_a_patcher_with_its_own_arithmetic_is_asked() -> None:
    model = nn.Module()
    model.layer = nn.Linear(5, 6)
    plain = ModelPatcher(model, CPU, CPU)
    plain.add_patches({"layer.weight": lora((6, 5))})
    expected = plain.patch_weight_to_device("layer.weight", return_weight=True)
    own = Counting(model, CPU, CPU)
    own.patches = plain.patches
    got = own.patch_weight_to_device("layer.weight", return_weight=True)
    assert expected is not None
    assert got is not None
    torch.testing.assert_close(got, expected + 1.0)
