"""Weight files: mapped, checked, and refused with the reason and the mend."""

from __future__ import annotations

import gc
import json
import os
import pickle
import struct
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from comfy import ops
from comfy.weights import mapped_file
from comfy.weights.assign import assign_weights
from comfy.weights.errors import (
    EmptyWeightFileError,
    HtmlPageError,
    LfsPointerError,
    MissingWeightFileError,
    NotANumberError,
    NotSafetensorsError,
    TextFileError,
    TruncatedWeightFileError,
    UnknownWeightFormatError,
    UnreadableWeightFileError,
    UnsafePickleError,
    WeightFileError,
)
from comfy.weights.state_dict import (
    calculate_parameters,
    load_torch_file,
    save_torch_file,
    state_dict_prefix_replace,
    weight_dtype,
)


def safetensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


SOUND = safetensors({"a": entry("F32", [2], 0, 8)}, bytes(8))

BROKEN = {
    "empty": (b"", EmptyWeightFileError, "empty"),
    "web page": (b"<!DOCTYPE html><html>", HtmlPageError, "web page"),
    "page of errors": (b"\n<html><head>", HtmlPageError, "web page"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", LfsPointerError, "git lfs pull"),
    "few bytes": (b"abc", TruncatedWeightFileError, "3 bytes"),
    "cut off": (SOUND[:-1], TruncatedWeightFileError, "the file has"),
    "cut header": (SOUND[:20], TruncatedWeightFileError, "the file has 20"),
    "too long": (SOUND + b"x", NotSafetensorsError, "belong to none"),
    "garbage": (b"y" * 64, NotSafetensorsError, "no safetensors header"),
    "huge header": (b"\xff" * 8 + b"{}", NotSafetensorsError, "at most"),
    "not json": (safetensors(b"{not json}"), NotSafetensorsError, "not JSON"),
    "deep json": (safetensors(b'{"a":' + b"[" * 100_000), NotSafetensorsError, "not JSON"),
    "unknown type": (safetensors({"a": entry("F7", [1], 0, 1)}, b"0"), NotSafetensorsError, "F7"),
    "wrong size": (
        safetensors({"a": entry("F32", [3], 0, 8)}, bytes(8)),
        NotSafetensorsError,
        "12",
    ),
    "negative": (
        safetensors({"a": entry("F32", [-2], 0, 8)}, bytes(8)),
        NotSafetensorsError,
        "'a'",
    ),
    "overlap": (
        safetensors({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12)),
        NotSafetensorsError,
        "overlap",
    ),
    "a key twice": (
        safetensors(
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
            bytes(2),
        ),
        NotSafetensorsError,
        "'a' twice",
    ),
    "endless axis": (
        safetensors({"a": entry("F32", [0, 2**70], 0, 0)}),
        NotSafetensorsError,
        "impossible",
    ),
    "many axes": (
        safetensors({"a": entry("F32", [1] * 65, 0, 4)}, bytes(4)),
        NotSafetensorsError,
        "impossible",
    ),
    "fractions": (
        safetensors({"a": entry("F32", [1.0], 0, 4)}, bytes(4)),  # type: ignore[list-item]
        NotSafetensorsError,
        "impossible",
    ),
    "a list": (safetensors([1, 2]), NotSafetensorsError, "no safetensors header"),
    "metadata of another kind": (
        safetensors({"__metadata__": [1]}),
        NotSafetensorsError,
        "__metadata__",
    ),
    "a gap": (
        safetensors({"a": entry("F32", [1], 4, 8)}, bytes(8)),
        NotSafetensorsError,
        "gap",
    ),
    "offsets the wrong way": (
        safetensors({"a": entry("F32", [1], 4, 0)}, bytes(4)),
        NotSafetensorsError,
        "impossible",
    ),
    "answer of a server": (
        b'{"error":"Unauthorized","message":"sign in"}',
        TextFileError,
        "Unauthorized",
    ),
    "message": (b"Invalid username or password.", TextFileError, "Invalid username"),
    "not numbers": (
        safetensors(
            {"a": entry("F16", [4], 0, 8), "b": entry("BF16", [2], 8, 12)},
            struct.pack("<4H", *[0x7E00] * 4) + struct.pack("<2H", *[0x7FC0] * 2),
        ),
        NotANumberError,
        "NaN",
    ),
    "no offsets": (safetensors({"a": {"dtype": "F32"}}), NotSafetensorsError, "incomplete"),
    "another format": (b"GGUF" + bytes(32), UnknownWeightFormatError, "GGUF"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_with_its_name_the_cause_and_the_mend(
    kind: str, tmp_path: Path
) -> None:
    contents, error, cause = BROKEN[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(contents)
    with pytest.raises(error) as caught:
        load_torch_file(path)
    text = str(caught.value)
    assert str(path) in text
    assert cause in text
    assert "To mend it" in text


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.safetensors", tmp_path):
        with pytest.raises(MissingWeightFileError) as caught:
            load_torch_file(path)
        assert isinstance(caught.value, FileNotFoundError)
        assert str(path) in str(caught.value)


def test_a_pickle_that_would_run_code_is_not_read(tmp_path: Path) -> None:
    class Dangerous:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "made"),)

    path = tmp_path / "model.ckpt"
    torch.save({"state_dict": {"a": torch.ones(1)}, "extra": Dangerous()}, path)
    with pytest.raises(UnsafePickleError, match="safetensors"):
        load_torch_file(path)
    path.write_bytes(pickle.dumps(Dangerous(), protocol=2))
    with pytest.raises(WeightFileError):
        load_torch_file(path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_an_old_checkpoint_with_objects_of_its_training_loads_without_them(
    zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "pytorch_lightning.callbacks.model_checkpoint"
    for depth in range(1, 4):
        part = ".".join(name.split(".")[:depth])
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    callback: Any = type("ModelCheckpoint", (), {"__module__": name})
    sys.modules[name].ModelCheckpoint = callback  # type: ignore[attr-defined]
    kept = callback()
    kept.best = 3
    content = {
        "state_dict": {"a": torch.ones(2)},
        "callbacks": {callback: {"score": np.float64(0.5), "step": np.int64(3)}, "kept": kept},
    }
    torch.save(content, tmp_path / "old.ckpt", _use_new_zipfile_serialization=zipped)
    monkeypatch.undo()
    assert load_torch_file(tmp_path / "old.ckpt").keys() == {"a"}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 0.99])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickled_file_that_was_cut_off_is_refused(
    zipped: bool, share: float, tmp_path: Path
) -> None:
    path = tmp_path / "cut.ckpt"
    torch.save({"a": torch.ones(500)}, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    path.write_bytes(whole[: 4 + int(share * (len(whole) - 4))])
    with pytest.raises(WeightFileError, match=r"cut\.ckpt") as caught:
        load_torch_file(path)
    assert "To mend it" in str(caught.value)


def test_archives_lists_and_modules_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(UnknownWeightFormatError, match="zip archive"):
        load_torch_file(path)
    torch.save([torch.ones(1)], path)
    with pytest.raises(UnknownWeightFormatError, match="list"):
        load_torch_file(path)
    torch.save(torch.nn.Linear(1, 1), path)
    with pytest.raises(UnsafePickleError, match=r"nn\.modules\.linear\.Linear") as caught:
        load_torch_file(path)
    assert "add_safe_globals" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "locked.safetensors"
    path.write_bytes(SOUND)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(UnreadableWeightFileError, match=r"locked.*Permission denied.*permissions"):
        load_torch_file(path)


def test_some_weights_that_are_not_numbers_are_a_warning(tmp_path: Path, caplog: Any) -> None:
    tensors = {"good": torch.ones(4), "bad": torch.full((4,), torch.nan), "none": torch.empty(0)}
    save_file(tensors, tmp_path / "m.safetensors")
    assert load_torch_file(tmp_path / "m.safetensors").keys() == tensors.keys()
    assert "1 of 2 weights" in caplog.text
    assert "bad" in caplog.text


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "single"])
def test_a_pickle_of_weights_is_unwrapped(wrap: str, tmp_path: Path) -> None:
    weights = {"a": torch.ones(2), "b": torch.zeros(3)}
    content = {
        "plain": weights,
        "state_dict": {"state_dict": weights, "global_step": 5},
        "single": {"model": weights},
    }[wrap]
    torch.save(content, tmp_path / "model.pt")
    assert load_torch_file(tmp_path / "model.pt").keys() == weights.keys()


def test_contents_decide_the_format_not_the_name(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model.ckpt")
    assert torch.equal(load_torch_file(tmp_path / "model.ckpt")["a"], torch.ones(2))


ALL_TYPES = {
    str(dtype): torch.arange(6).to(torch.float32).to(dtype)
    for dtype in mapped_file.SAFETENSORS_TYPES.values()
    if "fnuz" not in str(dtype) and dtype != torch.complex64
}


@pytest.mark.parametrize("memory_map", [True, False])
def test_every_type_reads_as_the_library_reads_it(memory_map: bool, tmp_path: Path) -> None:
    path = tmp_path / "types.safetensors"
    tensors = {name: t.reshape(2, 3) for name, t in ALL_TYPES.items()}
    tensors["scalar"], tensors["none"] = torch.tensor(2.5), torch.empty(0, 4)
    save_file(tensors, path, metadata={"format": "pt", "note": "é"})
    got, metadata = mapped_file.open_tensors(path, memory_map)
    want = load_file(path)
    assert metadata == {"format": "pt", "note": "é"}
    assert got.keys() == want.keys()
    for key in want:
        assert got[key].dtype == want[key].dtype
        assert got[key].shape == want[key].shape
        assert torch.equal(
            got[key].reshape(-1).view(torch.uint8), want[key].reshape(-1).view(torch.uint8)
        )


def test_writing_to_a_mapped_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(4096)}, path)
    tensor = load_torch_file(path)["a"]
    tensor += 1
    assert torch.equal(load_torch_file(path)["a"], torch.zeros(4096))
    assert tensor.sum() == 4096


def test_the_mapping_lives_as_long_as_its_tensors(tmp_path: Path) -> None:
    save_file({"a": torch.arange(1000.0)}, tmp_path / "m.safetensors")
    tensor = load_torch_file(tmp_path / "m.safetensors")["a"]
    (tmp_path / "m.safetensors").unlink()
    gc.collect()
    assert torch.equal(tensor, torch.arange(1000.0))
    assert mapped_file.is_file_backed(tensor)
    assert mapped_file.is_file_backed(tensor[3:7])
    assert not mapped_file.is_file_backed(tensor.clone())


def test_released_pages_read_the_file_again(tmp_path: Path) -> None:
    save_file({"a": torch.arange(100_000.0)}, tmp_path / "m.safetensors")
    tensor = load_torch_file(tmp_path / "m.safetensors")["a"]
    total = tensor.sum().item()
    assert mapped_file.release_pages(tensor) > 350_000
    assert tensor.sum().item() == total
    assert mapped_file.release_pages(torch.ones(10_000)) == 0


def test_pages_that_were_written_to_are_kept(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100_000), "b": torch.zeros(100_000)}, tmp_path / "m.safetensors")
    tensors = load_torch_file(tmp_path / "m.safetensors")
    tensors["a"][50_000] = 7
    assert mapped_file.release_pages(tensors["a"]) == 0
    assert mapped_file.release_pages(tensors["b"]) > 0
    assert tensors["a"].sum() == 7


def resident_pages(tensor: torch.Tensor) -> int:
    """Pages of a tensor that are in the page table (https://docs.kernel.org/admin-guide/mm)."""
    first, end = tensor.data_ptr() // 4096, (tensor.data_ptr() + tensor.nbytes + 4095) // 4096
    with open("/proc/self/pagemap", "rb", buffering=0) as table:
        table.seek(first * 8)
        entries = np.frombuffer(table.read((end - first) * 8), dtype=np.uint64)
    return int((entries >> np.uint64(63)).sum())


@pytest.mark.skipif(not os.path.exists("/proc/self/pagemap"), reason="tells of pages on Linux only")
def test_populated_pages_are_there_before_they_are_read_and_go_when_released(
    tmp_path: Path,
) -> None:
    save_file({"a": torch.arange(1_000_000.0), "b": torch.ones(1_000)}, tmp_path / "m.safetensors")
    tensors = load_torch_file(tmp_path / "m.safetensors")
    before = resident_pages(tensors["a"])
    mapped_file.populate_pages(tensors["a"])
    assert resident_pages(tensors["a"]) >= max(before, 900)
    assert torch.equal(tensors["a"], torch.arange(1_000_000.0))
    assert mapped_file.release_pages(tensors["a"]) > 3_900_000  # none of them counts as written to
    assert resident_pages(tensors["a"]) < 10


def test_populating_is_only_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped_file.populate_pages(torch.ones(10_000))  # of no file
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(100_000), "b": torch.zeros(0)}, path)
    tensors = load_torch_file(path)
    tensors["a"][50_000] = 7
    mapped_file.populate_pages(tensors["a"])
    mapped_file.populate_pages(tensors["b"])
    assert tensors["a"].sum() == 7
    monkeypatch.setattr(mapped_file, "MADV_POPULATE_READ", 9999)  # as on an older system
    mapped_file.populate_pages(tensors["a"])
    assert tensors["a"].sum() == 7
    monkeypatch.undo()
    os.truncate(path, 0)
    mapped_file.populate_pages(tensors["a"])  # where reading would end the process


def test_unaligned_tensors_are_copied(tmp_path: Path) -> None:
    header = json.dumps({"a": entry("F32", [1], 0, 4)}).encode()
    header += b" " * ((3 - len(header)) % 8)  # the data part starts at an odd address
    (tmp_path / "m.safetensors").write_bytes(safetensors(header, struct.pack("<f", 1.5)))
    tensor = load_torch_file(tmp_path / "m.safetensors")["a"]
    assert tensor.item() == 1.5
    assert tensor.data_ptr() % 4 == 0


def test_assigned_weights_share_the_file_and_only_others_are_converted(tmp_path: Path) -> None:
    layer = ops.disable_weight_init.Linear(4, 3, dtype=torch.float32)
    weights = {"weight": torch.randn(3, 4), "bias": torch.randn(3).half()}
    save_file(weights, tmp_path / "m.safetensors")
    state_dict = load_torch_file(tmp_path / "m.safetensors")
    report = assign_weights(layer, {**state_dict, "stray": torch.ones(1)})
    assert (report.missing, report.unexpected, report.matched) == ((), ("stray",), 2)
    assert layer.weight.data_ptr() == state_dict["weight"].data_ptr()
    assert layer.bias.dtype == torch.float32
    assert torch.equal(layer.bias, weights["bias"].float())
    assert not layer.weight.requires_grad


def test_consumed_entries_are_taken_and_missing_ones_reported() -> None:
    layer = ops.disable_weight_init.Linear(2, 2, device="meta")
    state_dict = {"weight": torch.ones(2, 2)}
    report = assign_weights(layer, state_dict, consume=True)
    assert state_dict == {}
    assert report.missing == ("bias",)


def test_a_tensor_of_another_shape_is_an_error_that_names_both() -> None:
    layer = ops.disable_weight_init.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"\[3, 3\].*\[2, 2\]"):
        assign_weights(layer, {"weight": torch.ones(3, 3)})


def test_saving_replaces_a_mapped_file_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_torch_file({"a": torch.zeros(8)}, path, metadata={"v": "1"})
    old = load_torch_file(path)["a"]
    save_torch_file({"a": torch.ones(8).reshape(2, 4).t()}, path)
    new, metadata = load_torch_file(path, return_metadata=True)
    assert torch.equal(old, torch.zeros(8))
    assert torch.equal(new["a"], torch.ones(4, 2))
    assert metadata == {}
    assert list(tmp_path.iterdir()) == [path]


def test_prefixes_counts_and_types_of_state_dicts() -> None:
    sd = {"m.a": torch.ones(2, dtype=torch.half), "m.b": torch.ones(3), "x": torch.ones(9)}
    assert calculate_parameters(sd, "m.") == 5
    assert weight_dtype(sd, "m.") == torch.float32
    assert weight_dtype(sd, "none") is None
    moved = state_dict_prefix_replace(sd, {"m.": "n."}, filter_keys=True)
    assert list(moved) == ["n.a", "n.b"]
    assert list(sd) == ["x"]
