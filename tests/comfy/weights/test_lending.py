"""Weights that lend their memory to their patched forms come back bit for bit, whatever happens."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from comfy.weights import lending, row_blocks
from comfy.weights.adapters import LoRAAdapter
from comfy.weights.assign import assign_weights
from comfy.weights.holders import is_held_once
from comfy.weights.lending import LentWeight, lent_weight
from comfy.weights.pages import WeightMemory
from comfy.weights.sources import source_of
from comfy.weights.state_dict import load_torch_file

WIDTHS = [
    (torch.float16, torch.float32), (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16), (torch.float32, torch.bfloat16),
]  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_blocks, "BLOCK_ELEMENTS", 500)


class Holder(nn.Module):
    """A module with one weight, on the meta device in the layout wanted."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, channels_last: bool) -> None:
        super().__init__()
        empty = torch.empty(shape, dtype=dtype, device="meta")
        if channels_last:
            empty = empty.contiguous(memory_format=torch.channels_last)
        self.weight = nn.Parameter(empty, requires_grad=False)


def loaded(
    folder: Path, shape: tuple[int, ...] = (40, 60), stored: torch.dtype = torch.float16,
    used: torch.dtype = torch.float32, channels_last: bool = False,
) -> Holder:  # fmt: skip
    """A module whose weight was converted from a file."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(stored)
    save_file({"weight": values}, folder / "w.safetensors")
    module = Holder(shape, used, channels_last)
    assign_weights(module, load_torch_file(folder / "w.safetensors"))
    return module


def lora(shape: tuple[int, ...], seed: int = 0, strength: float = 0.8, model: float = 1.0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(shape[0], 4, generator=generator)
    down = torch.randn(4, *shape[1:], generator=generator)
    return (strength, LoRAAdapter(set(), (up, down, 2.0, None, None, None)), model, None, None)


def lent_of(module: Holder) -> LentWeight:
    lent = lent_weight(module._parameters, "weight", "weight", WeightMemory())
    assert lent is not None
    return lent


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().contiguous().view(torch.uint8)


@pytest.mark.parametrize(("stored", "used"), WIDTHS, ids=str)
@pytest.mark.parametrize(
    ("shape", "channels_last"),
    [((1, 3), False), ((40, 60), False), ((100, 7), False), ((9, 4, 5), False),
     ((24, 6, 3, 3), False), ((24, 6, 3, 3), True)],
)  # fmt: skip
def test_patched_in_place_and_back_bit_for_bit(
    shape: tuple[int, ...], channels_last: bool, stored: torch.dtype, used: torch.dtype,
    tmp_path: Path,
) -> None:  # fmt: skip
    module = loaded(tmp_path, shape, stored, used, channels_last)
    before, address = bits(module.weight), module.weight.data_ptr()
    lent = lent_of(module)
    for patches in ([lora(shape)], [lora(shape, 1), lora(shape, 2, -1.5, 0.5)]):
        lent.take_back()
        assert torch.equal(bits(module.weight), before)
        want = row_blocks.patched(patches, module.weight, "weight", WeightMemory())
        assert lent.patch(patches)
        assert torch.equal(module.weight, want)
        assert torch.equal(bits(lent.copy()), before)
        assert lent.copy().stride() == module.weight.stride()
    assert lent.patch([lora(shape, 5)])  # straight from one to the other
    again = [lora(shape)]
    assert lent.patch(again)
    want = row_blocks.patched(again, lent.copy(), "weight", WeightMemory())
    assert torch.equal(module.weight, want)
    lent.take_back()
    assert torch.equal(bits(module.weight), before)
    assert module.weight.data_ptr() == address


def test_a_file_that_only_changes_its_layout_is_a_source(tmp_path: Path) -> None:
    module = loaded(tmp_path, (24, 6, 3, 3), torch.float32, torch.float32, channels_last=True)
    before = bits(module.weight)
    lent = lent_of(module)
    assert lent.patch([lora((24, 6, 3, 3))])
    lent.take_back()
    assert torch.equal(bits(module.weight), before)


def test_what_is_used_as_the_file_has_it_or_was_read_has_no_source(tmp_path: Path) -> None:
    module = loaded(tmp_path, stored=torch.float32)
    assert source_of(module.weight) is None
    module = Holder((4, 4), torch.float32, False)
    assign_weights(module, {"weight": torch.zeros(4, 4, dtype=torch.float16)})
    assert source_of(module.weight) is None


@pytest.mark.parametrize("where", [(0, 0), (17, 31), (39, 59)])
@pytest.mark.parametrize("value", [7.0, float("nan"), 1e-40])
def test_a_weight_changed_by_hand_is_left_alone(
    where: tuple[int, int], value: float, tmp_path: Path
) -> None:
    module = loaded(tmp_path)
    module.weight.data[where] = value
    before = bits(module.weight)
    lent = lent_of(module)
    assert not lent.patch([lora((40, 60))])
    assert not lent.is_lent
    assert torch.equal(bits(module.weight), before)


@pytest.mark.parametrize(("stored", "used"), WIDTHS, ids=str)
@pytest.mark.parametrize(
    ("shape", "channels_last"), [((40, 60), False), ((7, 3), False), ((24, 6, 3, 3), True)]
)
def test_any_bit_of_any_block_is_a_change(
    shape: tuple[int, ...], channels_last: bool, stored: torch.dtype, used: torch.dtype,
    tmp_path: Path,
) -> None:  # fmt: skip
    module = loaded(tmp_path, shape, stored, used, channels_last)
    lent = lent_of(module)
    weight = row_blocks.as_rows(module.weight, module.weight).flatten()
    integers = weight.view(torch.int32 if used == torch.float32 else torch.int16)
    for place in [*range(0, weight.numel(), 97), weight.numel() - 1]:
        for bit in (0, 9, used.itemsize * 8 - 1):
            plain = integers[place].item()
            integers[place] ^= -(1 << bit) if bit == used.itemsize * 8 - 1 else 1 << bit
            changed = bits(module.weight)
            assert not lent.patch([lora(shape)])
            assert not lent.is_lent
            assert torch.equal(bits(module.weight), changed)
            integers[place] = plain
    assert lent.patch([lora(shape)])


def test_a_weight_without_elements_is_no_obstacle(tmp_path: Path) -> None:
    module = loaded(tmp_path, (3, 0))
    lent = lent_weight(module._parameters, "weight", "weight", WeightMemory())
    assert lent is None or lent.patch([lora((3, 0))])
    assert module.weight.shape == (3, 0)


def test_the_sign_of_zero_is_a_change(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(8, 8).half()}, tmp_path / "w.safetensors")
    module = Holder((8, 8), torch.float32, False)
    assign_weights(module, load_torch_file(tmp_path / "w.safetensors"))
    module.weight.data.neg_()
    assert not lent_of(module).patch([lora((8, 8))])


def test_not_a_number_in_the_file_is_none(tmp_path: Path) -> None:
    values = torch.tensor([[float("nan"), float("inf")], [-0.0, 65504.0]]).half()
    save_file({"weight": values}, tmp_path / "w.safetensors")
    module = Holder((2, 2), torch.float32, False)
    assign_weights(module, load_torch_file(tmp_path / "w.safetensors"))
    before, lent = bits(module.weight), lent_of(module)
    assert lent.patch([lora((2, 2))])
    lent.take_back()
    assert torch.equal(bits(module.weight), before)


@pytest.mark.parametrize("first", [False, True], ids=["first patch", "to another"])
@pytest.mark.parametrize("used", [torch.float32, torch.bfloat16], ids=str)
def test_whatever_is_raised_in_the_middle_leaves_the_way_back_open(
    first: bool, used: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = torch.float16 if used == torch.float32 else torch.float32
    module = loaded(tmp_path, stored=stored, used=used)
    before, add, steps = bits(module.weight), row_blocks._add, 0

    def step() -> None:
        nonlocal steps
        steps -= 1
        if steps == 0:
            raise KeyboardInterrupt

    def failing(*args: Any) -> None:
        step()
        add(*args)
        step()

    monkeypatch.setattr(row_blocks, "_add", failing)
    lent = lent_of(module)
    for number in range(1, 30):
        if not first:
            steps = 0
            assert lent.patch([lora((40, 60), 1)])
        steps = number
        try:
            done = lent.patch([lora((40, 60))])
        except KeyboardInterrupt:
            done = False
        assert torch.equal(bits(lent.copy()), before)
        lent.take_back()
        assert torch.equal(bits(module.weight), before)
        if done:
            break
    assert number == (3 if used == torch.float32 else 11)


def test_other_patches_are_left_to_others(tmp_path: Path) -> None:
    module = loaded(tmp_path)
    before, lent = bits(module.weight), lent_of(module)
    other = (1.0, ("diff", (torch.ones(40, 60),)), 1.0, None, None)
    assert not lent.patch([lora((40, 60)), other])
    assert lent.patch([lora((40, 60))])
    assert not lent.patch([other])
    lent.take_back()
    assert torch.equal(bits(module.weight), before)


def test_new_memory_for_the_original_while_the_patched_form_keeps_its_own(tmp_path: Path) -> None:
    module = loaded(tmp_path)
    weight, before = module.weight, bits(module.weight)
    del module.weight
    module.weight = weight
    del weight
    lent = lent_of(module)
    shown = lent.weight.detach()
    assert lent.patch([lora((40, 60))])
    patched = shown.clone()
    assert not lent.can_write()
    original = lent.whole()
    assert original is module.weight
    assert torch.equal(bits(original), before)
    assert torch.equal(shown, patched)
    assert not lent.is_lent


# -- the file -----------------------------------------------------------------------------------


def test_a_file_that_is_replaced_or_removed_changes_nothing(tmp_path: Path) -> None:
    module = loaded(tmp_path)
    before, lent = bits(module.weight), lent_of(module)
    assert lent.patch([lora((40, 60))])
    save_file({"weight": torch.zeros(40, 60).half()}, tmp_path / "new")
    os.replace(tmp_path / "new", tmp_path / "w.safetensors")
    assert lent.patch([lora((40, 60), 1)])
    os.unlink(tmp_path / "w.safetensors")
    lent.take_back()
    assert torch.equal(bits(module.weight), before)


@pytest.mark.parametrize("cut", [False, True], ids=["written over", "cut off"])
@pytest.mark.parametrize("used", [torch.float32, torch.bfloat16], ids=str)
def test_a_file_written_over_meanwhile_is_not_read(
    cut: bool, used: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = loaded(tmp_path, stored=torch.float16, used=used)
    plain, lent = module.weight.detach().clone(), lent_of(module)
    assert lent.patch([lora((40, 60)), lora((40, 60), 3, 0.5, 0.5)])
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"" if cut else bytes(path.stat().st_size))
    tolerance = {"rtol": 0, "atol": 1e-5 if used == torch.float32 else 0.2}
    with caplog.at_level(logging.ERROR):
        assert not lent.patch([lora((40, 60), 1)])
        torch.testing.assert_close(lent.copy(), plain, **tolerance)  # type: ignore[call-overload]
        lent.take_back()
    torch.testing.assert_close(module.weight.detach(), plain, **tolerance)  # type: ignore[call-overload]
    assert [record.message for record in caplog.records if "written over" in record.message] == [
        caplog.records[0].message
    ]
    del lent
    again = lent_weight(module._parameters, "weight", "weight", WeightMemory())
    assert (again is None) is cut
    assert again is None or not again.patch([lora((40, 60))])


def test_what_cannot_be_subtracted_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = loaded(tmp_path)
    lent = lent_of(module)
    assert lent.patch([lora((40, 60), model=0.0)])
    (tmp_path / "w.safetensors").write_bytes(b"")
    lent.take_back()
    assert "'weight' cannot be restored" in caplog.text


# -- who else holds a weight ---------------------------------------------------------------------


HOLDERS = {
    "reference": lambda m: m.weight,
    "view": lambda m: m.weight[3:5],
    "data": lambda m: m.weight.data,
    "state dict": lambda m: m.state_dict(),
    "array": lambda m: m.weight.numpy(),
    "storage": lambda m: m.weight.untyped_storage(),
    "another layer": lambda m: setattr(other := Holder((40, 60), torch.float32, False), "weight",
                                       m.weight) or other,
    "list": lambda m: list(m.parameters()),
    "graph": lambda m: torch.ones(2, 60, requires_grad=True) @ m.weight.T,
    "other processes": lambda m: m.weight.share_memory_().ndim,
}  # fmt: skip


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_weight_that_somebody_else_holds_lends_nothing(kind: str, tmp_path: Path) -> None:
    module = loaded(tmp_path)
    assert is_held_once(module._parameters, "weight")
    holder = HOLDERS[kind](module)
    assert not is_held_once(module._parameters, "weight")
    assert lent_weight(module._parameters, "weight", "weight", WeightMemory()) is None
    del holder
    assert is_held_once(module._parameters, "weight") is (kind != "other processes")


def test_a_torch_that_does_not_tell_has_weights_patched_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = loaded(tmp_path)
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    assert not is_held_once(module._parameters, "weight")


def test_large_weights_are_held_once_in_memory_of_their_own(tmp_path: Path) -> None:
    module = loaded(tmp_path, (1024, 1100))
    assert is_held_once(module._parameters, "weight")
    assert lending.lent_weight(module._parameters, "weight", "w", WeightMemory()) is not None


@pytest.mark.parametrize("load_in_inference", [False, True])
@pytest.mark.parametrize("patch_in_inference", [False, True])
def test_weights_stay_of_the_kind_they_are(
    load_in_inference: bool, patch_in_inference: bool, tmp_path: Path
) -> None:
    with torch.inference_mode(load_in_inference):
        module = loaded(tmp_path)
    before = bits(module.weight)
    with torch.inference_mode(patch_in_inference):
        lent = lent_of(module)
        assert lent.patch([lora((40, 60))])
        lent.take_back()
        assert torch.equal(bits(module.weight), before)
        assert lent.patch([lora((40, 60))])
        lent.whole()
    assert torch.equal(bits(module.weight), before)
    assert module.weight.is_inference() is load_in_inference
    assert "Parameter" in repr(module.weight)
    module.weight.clone().mul_(2)
