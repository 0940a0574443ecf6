"""Damaged and hostile headers of GGUF files: each is an error that names the file, and none costs
memory or time before it is checked."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comfy.weights.errors import WeightFileError
from comfy.weights.low_bit.stored import StoredWeight
from comfy.weights.state_dict import load_torch_file
from tests.support import gguf_files

ROWS = {"blk.0.attn_q.weight": torch.ones(4, 32)}
PIECES = {"general.architecture": "qwen3", "tokenizer.ggml.tokens": ["a", "b", "ab"]}
SCORED = {**PIECES, "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0, 1.0, 2.0]}
PAIRED = {**PIECES, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
TOWER = {"general.architecture": "clip"}


def read(
    folder: Path, tensors: dict[str, Tensor], facts: dict[str, Any], **more: Any
) -> dict[str, Tensor]:
    return load_torch_file(gguf_files.write(folder / "odd.gguf", tensors, "Q8_0", facts, **more))


@pytest.mark.parametrize("value", ["abc", [1], float("nan"), float("inf"), 0, -32])
def test_an_alignment_that_is_no_number_of_bytes_is_an_error(value: Any, tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match=r"odd\.gguf: general\.alignment is .*from 1 on"):
        read(tmp_path, {"x": torch.ones(4)}, {"general.alignment": value})


@pytest.mark.parametrize("value", ["many", [2], 0.5, -1])
def test_a_count_of_parts_that_is_no_number_is_an_error(value: Any, tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match=r"odd\.gguf: split\.count is .*from 0 on"):
        read(tmp_path, {"x": torch.ones(4)}, {"split.count": value})


def test_a_file_that_was_joined_from_parts_is_whole(tmp_path: Path) -> None:
    assert list(read(tmp_path, {"x": torch.ones(4)}, {"split.count": 0, "split.no": 0})) == ["x"]


@pytest.mark.parametrize("shape", [3, "abc", [4.0, 32.0], ["a"], [-4, -32], [2, 32], [1] * 99])
def test_a_former_shape_that_is_none_of_the_tensor_is_an_error(shape: Any, tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match=r"'x' is said to have had the shape .*has \[4, 32\]"):
        read(tmp_path, {"x": torch.ones(4, 32)}, {"comfy.gguf.orig_shape.x": shape})


def test_a_tensor_named_twice_is_an_error(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "odd.gguf", {"x.a": torch.ones(4), "x.b": torch.ones(4)})
    path.write_bytes(path.read_bytes().replace(b"x.b", b"x.a"))
    with pytest.raises(WeightFileError, match=r"odd\.gguf: its header names 'x.a' twice"):
        load_torch_file(path)


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 0, 32)])
@pytest.mark.parametrize("kind", ["Q8_0", "F32"])
def test_a_tensor_without_numbers_is_read(
    kind: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / "x.gguf"
    gguf_files.write(path, {"x": torch.ones(1, 32)}, lambda *_: kind, shapes={"x": shape})
    found = load_torch_file(path)["x"]
    assert found.shape == shape
    assert found.clone().float().shape == shape
    assert isinstance(found, StoredWeight) == (kind == "Q8_0")


@pytest.mark.parametrize(
    "shape", [(0, 2**64 - 1), (0, 2**40, 2**40), (2**40, 2**40), (2**32, 2**32)]
)
def test_a_shape_beyond_all_numbers_is_an_error(shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match=r"odd\.gguf: 'x' has the shape"):
        read(tmp_path, {"x": torch.ones(4, 32)}, {}, shapes={"x": shape})


@pytest.mark.parametrize("kind", [0, 4, 8, 10])
def test_a_list_that_cannot_be_in_the_file_is_not_made_room_for(kind: int, tmp_path: Path) -> None:
    header = struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, kind, 1 << 26)
    (tmp_path / "odd.gguf").write_bytes(b"GGUF" + header + b"\0" * 4096)
    with pytest.raises(WeightFileError, match=r"odd\.gguf: its header goes on after the end"):
        load_torch_file(tmp_path / "odd.gguf")


@pytest.mark.parametrize("heads", [0, -1, 3])
def test_rows_that_are_not_those_of_the_heads_are_an_error(heads: int, tmp_path: Path) -> None:
    facts = {"general.architecture": "llama", "llama.attention.head_count": heads}
    with pytest.raises(WeightFileError, match=rf"'blk.0.attn_q.weight' has 4 rows.*{heads} heads"):
        read(tmp_path, ROWS, facts)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({**SCORED, "tokenizer.ggml.tokens": [1, 2]}, "tokens is no list of texts"),
        ({**SCORED, "tokenizer.ggml.tokens": 7}, "tokens is no list of texts"),
        ({**SCORED, "tokenizer.ggml.scores": 3}, "scores is no list of numbers"),
        ({**SCORED, "tokenizer.ggml.scores": ["a", "b", "c"]}, "scores is no list of numbers"),
        ({**SCORED, "tokenizer.ggml.token_type": 1}, "token_type is no list of whole numbers"),
        ({**SCORED, "tokenizer.ggml.token_type": [1, -2, 1]}, "token_type holds -2"),
        ({**SCORED, "tokenizer.ggml.precompiled_charsmap": "a"}, "charsmap is no list of whole"),
        ({**PAIRED, "tokenizer.ggml.merges": [1]}, "merges is no list of texts"),
        ({**PAIRED, "tokenizer.ggml.merges": 1}, "merges is no list of texts"),
        ({**PAIRED, "tokenizer.ggml.merges": ["a c"]}, r"merges joins \('a', 'c'\)"),
        ({**PAIRED, "tokenizer.ggml.merges": ["b a"]}, r"merges joins \('b', 'a'\)"),
    ],
)
def test_a_vocabulary_of_other_things_is_an_error(
    facts: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightFileError, match=rf"odd\.gguf: its vocabulary is broken: .*{said}"):
        read(tmp_path, ROWS, facts)


@pytest.mark.parametrize(
    "tensors",
    [
        {f"v.blk.0.attn_{part}.weight": torch.ones(4, 32 if part == "q" else 64) for part in "qkv"},
        {"v.blk.0.attn_q.weight": torch.ones(4, 32)},
        {**ROWS, "v.patch_embd.weight.1": torch.ones(4, 3, 2, 2)},
        {
            **ROWS,
            "v.patch_embd.weight": torch.ones(4, 3),
            "v.patch_embd.weight.1": torch.ones(4, 2),
        },
    ],
)
def test_parts_of_a_tower_that_do_not_fit_are_an_error(
    tensors: dict[str, Tensor], tmp_path: Path
) -> None:
    tensors = {key.replace("blk.0.attn_q", "v.blk.0.attn_out") if key in ROWS else key: value
               for key, value in tensors.items()}  # fmt: skip
    with pytest.raises(WeightFileError, match=r"odd\.gguf: v\..* do not fit together"):
        read(tmp_path, tensors, TOWER)


def test_any_damage_of_a_header_is_read_or_an_error_of_the_file(tmp_path: Path) -> None:
    facts = {"general.architecture": "llama", "llama.attention.head_count": 2, **SCORED}
    tensors = {
        **ROWS,
        "blk.0.attn_k.weight": torch.ones(4, 32),
        "output_norm.weight": torch.ones(4),
    }
    path = gguf_files.write(tmp_path / "odd.gguf", tensors, "Q8_0", facts)
    whole, dice = path.read_bytes(), random.Random(0)
    end = whole.index(b"output_norm") + 60
    refused = 0
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(4, end)] = dice.choice([0, 1, 8, 9, 255, dice.randrange(256)])
        path.write_bytes(damaged)
        try:
            for value in load_torch_file(path).values():
                value.float()
        except WeightFileError:
            refused += 1
    assert 100 < refused < 400
