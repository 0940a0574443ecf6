"""Memory of large weights: the tensors are ordinary ones, and freed memory serves the next."""

from __future__ import annotations

import copy
import mmap
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from comfy.devices.policies import MemoryPolicy
from comfy.devices.runtime import build_runtime, install_runtime
from comfy.patching.patcher import ModelPatcher
from comfy.weights import pages
from comfy.weights.adapters import LoRAAdapter
from comfy.weights.pages import WeightMemory

CPU = torch.device("cpu")
LARGE = (1024, 600)
"""2.3 MiB in float32: a mapping of its own."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize(
    "shape", [(), (0,), (3,), (5, 0), LARGE, (2048, 2048), (700, 9, 11, 3, 3), (2100, 1031)]
)
def test_a_tensor_is_an_ordinary_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    like = torch.empty(shape)
    got = WeightMemory().empty_like(like, dtype)
    assert (got.shape, got.stride(), got.dtype) == (like.shape, like.stride(), dtype)
    filled = torch.arange(like.numel()).remainder(7).reshape(shape).to(dtype)
    got.copy_(filled)
    assert torch.equal(got.float(), filled.float())
    assert torch.equal(copy.deepcopy(got).float(), filled.float())
    assert torch.equal(pickle.loads(pickle.dumps(got)).float(), filled.float())


@pytest.mark.parametrize(
    "shape", [(40, 8, 3, 3), (512, 200, 3, 3), (64, 1, 3, 3), (600, 1100, 1, 1)]
)
def test_layouts_are_kept(shape: tuple[int, ...]) -> None:
    rows = torch.randn(shape)
    for weight in (rows, rows.contiguous(memory_format=torch.channels_last), rows.transpose(0, 1)):
        got = WeightMemory().empty_like(weight)
        assert got.shape == weight.shape
        for layout in (torch.contiguous_format, torch.channels_last):
            assert got.is_contiguous(memory_format=layout) == weight.is_contiguous(
                memory_format=layout
            )


def test_freed_memory_serves_the_next_of_its_size_only_while_weights_are_replaced() -> None:
    memory = WeightMemory()
    first = memory.empty(LARGE, torch.float32)
    with memory.reuse():
        address = first.data_ptr()
        del first
        assert memory.kept_bytes == 4 * 1024 * 600
        other = memory.empty((1024, 601), torch.float32)
        second = memory.empty((600, 1024), torch.int32)
        assert second.data_ptr() == address
        assert other.data_ptr() != address
        assert memory.kept_bytes == 0
        del other
        assert memory.kept_bytes
    assert memory.kept_bytes == 0
    del second
    assert memory.kept_bytes == 0


def test_memory_somebody_still_looks_at_is_not_given_away() -> None:
    memory = WeightMemory()
    with memory.reuse():
        first = memory.empty(LARGE, torch.float32).fill_(1.0)
        part = first[5:9].view(torch.int32)
        array = first.numpy()
        del first
        second = memory.empty(LARGE, torch.float32).fill_(2.0)
        del part
        third = memory.empty(LARGE, torch.float32).fill_(3.0)
        assert (array == 1.0).all()
        assert len({array.ctypes.data, second.data_ptr(), third.data_ptr()}) == 3


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "KEPT_BYTES", 6 << 20)
    memory = WeightMemory()
    with memory.reuse():
        tensors = [memory.empty(LARGE, torch.float32) for _ in range(5)]
        tensors.clear()
        assert memory.kept_bytes == 2 * 4 * 1024 * 600
    with memory.reuse():
        large = memory.empty((4096, 600), torch.float32)
        del large
        assert memory.kept_bytes == 4 * 4096 * 600


class Refusing(mmap.mmap):
    """A mapping on a kernel without huge pages."""

    def madvise(self, *args: Any) -> None:
        raise OSError(22, "Invalid argument")


def refuse(*args: Any, **kwargs: Any) -> None:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize("mapping", [Refusing, refuse], ids=["no huge pages", "no mapping"])
def test_torch_serves_where_the_system_refuses(
    mapping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "has_huge_pages", lambda: True)
    monkeypatch.setattr(mmap, "mmap", mapping)
    got = WeightMemory().empty(LARGE, torch.float32).fill_(1.0)
    assert float(got.sum()) == 1024 * 600


@pytest.mark.parametrize("wanted", [True, False])
def test_huge_pages_are_asked_for_unless_switched_off(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Watched(mmap.mmap):
        def madvise(self, *args: Any) -> None:
            asked.append(args)
            super().madvise(*args)

    monkeypatch.setattr(pages, "has_huge_pages", lambda: hasattr(mmap, "MADV_HUGEPAGE"))
    monkeypatch.setattr(mmap, "mmap", Watched)
    install_runtime(build_runtime(MemoryPolicy(cpu=True, huge_pages=wanted)))
    try:
        got = WeightMemory().empty((2048, 1025), torch.float16).fill_(2.0)
    finally:
        install_runtime(None)
    assert [length for _, _, length in asked] == [4 << 20] * (wanted and pages.has_huge_pages())
    assert got.data_ptr() % pages.HUGE_PAGE == 0
    assert float(got[-1, -1]) == 2.0


@pytest.mark.parametrize(
    ("features", "gives"), [("01100101", True), ("01100001", False), ("", False)]
)
def test_a_machine_that_gives_free_memory_to_its_host_is_known(
    features: str, gives: bool, tmp_path: Path
) -> None:
    path = tmp_path / "features"
    path.write_text(features, encoding="ascii")
    assert pages._gives_memory_away(str(path)) is gives
    assert not pages._gives_memory_away(str(tmp_path / "absent"))


def lora(weight: torch.Tensor, seed: int) -> LoRAAdapter:
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(weight.shape[0], 4, generator=generator)
    down = torch.randn(4, weight.shape[1], generator=generator)
    return LoRAAdapter(set(), (up, down, 2.0, None, None, None))


def test_a_weight_kept_from_a_former_view_is_not_written_to() -> None:
    model = nn.Sequential(nn.Linear(600, 1024, bias=False), nn.Linear(1024, 600, bias=False))
    originals = [p.detach().clone() for p in model.parameters()]
    views = [ModelPatcher(model, CPU, CPU) for _ in range(2)]
    for number, view in enumerate(views):
        view.add_patches({k: lora(w, number) for k, w in model.state_dict().items()})
    views[0].patch_model(CPU)
    kept = model[0].weight.detach()
    values = kept.clone()
    freed = model[1].weight.data_ptr()
    views[1].patch_model(CPU)
    assert torch.equal(kept, values)
    assert not torch.equal(model[0].weight, values)
    assert model[1].weight.data_ptr() == freed
    assert model[0].weight.data_ptr() != kept.data_ptr()
    views[1].unpatch_model()
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), originals))
    assert views[0].residence.memory.kept_bytes == 0
