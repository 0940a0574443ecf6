"""Weight files: written so that others can read them, and stopped by a cancellation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from comfy.interrupt import INTERRUPT, InterruptProcessingException
from comfy.weights import assign, mapped_file, written_file
from comfy.weights.assign import assign_weights
from comfy.weights.mapped_file import SAFETENSORS_TYPES, open_tensors
from comfy.weights.state_dict import load_torch_file, save_torch_file


@pytest.fixture(autouse=True)
def nobody_cancelled() -> Iterator[None]:
    yield
    INTERRUPT.clear()


@pytest.mark.parametrize("dtype", SAFETENSORS_TYPES.values(), ids=str)
def test_another_reader_finds_every_type(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.arange(16, dtype=torch.uint8).repeat(4)
    tensor = bits.bool() if dtype == torch.bool else bits.view(dtype)
    save_torch_file({"x": tensor, "byte": bits[:3]}, tmp_path / "a.safetensors")
    read, _ = open_tensors(tmp_path / "a.safetensors")
    assert read["x"].dtype == dtype
    assert torch.equal(read["x"].view(torch.uint8), tensor.view(torch.uint8))
    if dtype not in (
        getattr(torch, "float8_e4m3fnuz", None),
        getattr(torch, "float8_e5m2fnuz", None),
    ):
        other = load_file(tmp_path / "a.safetensors")["x"]
        assert torch.equal(other.view(torch.uint8), tensor.view(torch.uint8))


def test_shapes_views_shared_memory_and_metadata(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {
        "scalar": torch.tensor(5),
        "empty": torch.zeros(0, 3),
        "transposed": base.transpose(0, 2),
        "part": base[1],
        "expanded": torch.ones(1).expand(3, 5),
        "grad": nn.Parameter(base),
        "ключ": torch.tensor([True, False]),
    }
    path = tmp_path / "a.safetensors"
    save_torch_file(tensors, path, metadata={"prompt": "{}"})
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"prompt": "{}"}
        assert set(file.keys()) == set(tensors)
        for key, tensor in tensors.items():
            assert torch.equal(file.get_tensor(key), tensor.detach())


def test_a_type_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'x' is torch.complex128"):
        save_torch_file({"x": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_cancellation_stops_writing_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.safetensors"
    save_torch_file({"x": torch.zeros(4)}, path)
    before = path.read_bytes()
    monkeypatch.setattr(written_file, "PIECE_BYTES", 64)
    pieces = []

    def look() -> None:
        pieces.append(1)
        if len(pieces) == 3:
            raise InterruptProcessingException

    monkeypatch.setattr(written_file, "throw_exception_if_processing_interrupted", look)
    with pytest.raises(InterruptProcessingException):
        save_torch_file({"x": torch.ones(1000)}, path)
    assert len(pieces) == 3
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_cancellation_stops_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    weights = {f"{i}.weight": torch.ones(3, 3) for i in range(4)}
    save_torch_file(weights, path)
    monkeypatch.setattr(mapped_file, "PIECE_BYTES", 64)
    read, _ = open_tensors(path, memory_map=False)
    assert torch.equal(read["3.weight"], weights["3.weight"])
    network = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(4)))
    before = [layer.weight for layer in network]
    INTERRUPT.set()
    with pytest.raises(InterruptProcessingException):
        assign_weights(network, load_torch_file(str(path)))
    assert [layer.weight is weight for layer, weight in zip(network, before)] == [True] * 4
    INTERRUPT.set()
    with pytest.raises(InterruptProcessingException):
        open_tensors(path, memory_map=False)


@pytest.mark.parametrize("shape", [(7, 5), (6, 3, 3, 3), (9,), ()])
def test_blocks_of_a_weight_make_up_the_whole(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assign, "BLOCK_ELEMENTS", 10)
    network = nn.Module()
    network.weight = nn.Parameter(torch.empty(shape))
    if len(shape) == 4:
        network.to(memory_format=torch.channels_last)
    stored = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
    assign_weights(network, {"weight": stored})
    assert torch.equal(network.weight, stored.float())
    looks: list[int] = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            raise InterruptProcessingException

    monkeypatch.setattr(assign, "throw_exception_if_processing_interrupted", look)
    if stored.numel() > 10:
        with pytest.raises(InterruptProcessingException):
            assign_weights(network, {"weight": stored})
