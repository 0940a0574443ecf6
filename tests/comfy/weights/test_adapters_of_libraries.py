"""Adapters as PEFT and LyCORIS write them, beside their formulas in double precision."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy.weights.arithmetic import calculate_weight
from comfy.weights.diffusers_transformers import swap_scale_shift
from comfy.weights.lora import load_lora
from comfy.weights.state_dict import load_torch_file

KERNELS = [(3,), (3, 2), (2, 3, 2)]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def changed(
    file: dict[str, Tensor], weight: Tensor, strength: float = 1.0, function: Any = None
) -> Tensor:
    """A weight after the one change of a file."""
    patch = load_lora(file, {"x": "w.weight"})["w.weight"]
    return calculate_weight([(strength, patch, 1.0, None, function)], weight.clone(), "w.weight")


def assert_close(made: Tensor, expected: Tensor) -> None:
    assert torch.allclose(made.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "lokr whole"])
def test_convolutions_of_any_number_of_axes_are_changed(kernel: tuple[int, ...], kind: str) -> None:
    ones = (1,) * len(kernel)
    weight = rand(8, 6, *kernel)
    core, core2 = rand(2, 3, *kernel), rand(3, 3, *kernel, seed=1)
    if kind == "lora":
        up, down = rand(8, 2, *ones), rand(3, 6, *ones)
        file = {"lora_up.weight": up, "lora_down.weight": down, "lora_mid.weight": core}
        delta = torch.einsum("op,pr...,ri->oi...", up.flatten(1).double(), core.double(),
                             down.flatten(1).double())  # fmt: skip
    elif kind == "loha":
        parts = [rand(3, 8), rand(3, 6), rand(3, 8, seed=2), rand(3, 6, seed=2)]
        file = dict(zip(("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), parts))
        file |= {"hada_t1": core2, "hada_t2": core2 + 1}
        halves = [
            torch.einsum("io,ij...,jk->ok...", outer.double(), middle.double(), inner.double())
            for outer, middle, inner in (
                (parts[0], core2, parts[1]),
                (parts[2], core2 + 1, parts[3]),
            )
        ]
        delta = halves[0] * halves[1]
    else:
        w1 = rand(2, 3)
        a, b = rand(3, 4), rand(3, 2)
        w2 = torch.einsum("io,ij...,jk->ok...", a.double(), core2.double(), b.double())
        file = {"lokr_w1": w1, "lokr_w2": w2.float()}
        if kind == "lokr":
            file = {"lokr_w1": w1, "lokr_w2_a": a, "lokr_w2_b": b, "lokr_t2": core2}
        delta = torch.einsum("ab,cd...->acbd...", w1.double(), w2).reshape(weight.shape)
    made = changed({f"x.{name}": tensor for name, tensor in file.items()}, weight, 0.5)
    assert_close(made, weight.double() + 0.5 * delta)


def blocks_of(triangles: Tensor, size: int) -> Tensor:
    skew = torch.zeros(len(triangles), size, size, dtype=torch.float64)
    for block, numbers in zip(skew, triangles):
        pairs = [(row, column) for row in range(size) for column in range(row + 1, size)]
        for (row, column), number in zip(pairs, numbers):
            block[row, column], block[column, row] = number, -number
    return skew


@pytest.mark.parametrize("shape", [(6, 12), (6, 4, 3), (6, 2, 3, 2)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("settings", "terms"),
    [({}, 5), ({"use_cayley_neumann": True, "num_cayley_neumann_terms": 3}, 4),
     ({"use_cayley_neumann": True, "num_cayley_neumann_terms": 2}, 2),
     ({"use_cayley_neumann": True, "num_cayley_neumann_terms": 7}, 7),
     ({"use_cayley_neumann": False, "num_cayley_neumann_terms": 5}, 0)],
)  # fmt: skip
def test_rotations_of_inputs_follow_the_files_settings(
    tmp_path: Path, shape: tuple[int, ...], shared: bool, settings: dict[str, Any], terms: int
) -> None:
    weight, triangles = rand(*shape), rand(1 if shared else 3, 6) * 0.2
    path = tmp_path / "adapter_model.safetensors"
    save_file({"x.oft_R.weight": triangles}, path)
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    one = torch.eye(4, dtype=torch.float64)
    turns = []
    for skew in blocks_of(triangles, 4):
        powers = [torch.linalg.matrix_power(skew, n) for n in range(1, max(terms, 2))]
        factors = [2.0] * len(powers)
        if terms > 2:
            factors[-1] = 1.0
        series = one + sum(f * p for f, p in zip(factors, powers))
        turns.append(series if terms else (one - skew) @ torch.linalg.inv(one + skew))
    turn = torch.block_diag(*(turns * 3 if shared else turns))
    expected = (weight.flatten(1).double() @ turn.T).reshape(shape)
    made = changed(load_torch_file(path), weight)
    assert_close(made, expected)
    if not terms:
        assert torch.allclose(made.flatten(1).norm(dim=1), weight.flatten(1).norm(dim=1))
    half = changed(load_torch_file(path), weight, -0.5)
    assert_close(half, weight.double() - 0.5 * (expected - weight.double()))


def butterfly(size: int, groups: int, step: int) -> Tensor:
    """Permutation matrix that puts even runs of `step` before odd ones within each group."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    width = size // groups
    for group in range(groups):
        runs = [range(at, at + step) for at in range(group * width, (group + 1) * width, step)]
        order = [n for run in runs[0::2] + runs[1::2] for n in run]
        for place, number in enumerate(order):
            matrix[group * width + place, number] = 1
    return matrix


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("function", [None, swap_scale_shift])
def test_butterflies_of_inputs_scale_their_outputs(stages: int, function: Any) -> None:
    weight, learned, scale = rand(6, 16), rand(stages, 4, 4, 4) * 0.2, 1 + 0.3 * rand(6, 1)
    one, turn = torch.eye(4, dtype=torch.float64), torch.eye(16, dtype=torch.float64)
    for stage, matrices in enumerate(learned.double()):
        halves = [(m - m.T) / 2 for m in matrices]
        inner = torch.block_diag(*((one - q) @ torch.linalg.inv(one + q) for q in halves))
        order = butterfly(16, 4 >> stage, 2)
        turn = order @ inner @ order.T @ turn
    by_row = scale.double() if function is None else scale.double().roll(3, 0)
    expected = weight.double() @ turn.T * by_row
    file = {"x.boft_R": learned, "x.boft_s": scale}
    assert_close(changed(file, weight, 1.0, function), expected)


@pytest.mark.parametrize("name", ["oft_R.weight", "boft_R"])
def test_rotations_of_another_layer_leave_the_weight(name: str, caplog: Any) -> None:
    weight = rand(6, 10)
    tensor = rand(2, 6) if name.startswith("oft") else rand(1, 2, 4, 4)
    assert torch.equal(changed({f"x.{name}": tensor}, weight), weight)
    assert "rotate 8 inputs" in caplog.text


@pytest.mark.parametrize("feedforward", [["x"], [], "x", "y"])
def test_factors_of_a_convolution_belong_to_what_the_settings_say(
    tmp_path: Path, feedforward: Any
) -> None:
    weight, factors = rand(6, 6, 3, 3), torch.rand(1, 6, 1, 1)
    path = tmp_path / "adapter_model.safetensors"
    save_file({"x.ia3_l": factors}, path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"feedforward_modules": feedforward}))
    of_inputs = "x" in feedforward
    expected = weight.double() * (factors if of_inputs else factors.transpose(0, 1)).double()
    assert_close(changed(load_torch_file(path), weight), expected)


def test_factors_of_rows_stored_in_another_order_find_their_rows() -> None:
    weight, rows, columns = rand(6, 4), torch.rand(6, 1), torch.rand(1, 4)
    made = changed({"x.ia3_l": rows}, weight, 1.0, swap_scale_shift)
    assert_close(made, weight.double() * rows.double().roll(3, 0))
    made = changed({"x.ia3_l": columns}, weight, 1.0, swap_scale_shift)
    assert_close(made, weight.double() * columns.double())
