"""Weights that a view patches in a narrow type mean, over many seeds, the exact ones: for every
kind of change and every type a weight is stored in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from comfy import ops
from comfy.patching.patcher import ModelPatcher
from comfy.weights.arithmetic import calculate_weight
from comfy.weights.assign import assign_weights
from comfy.weights.lora import load_lora
from tests.comfy.patching.test_kinds_on_paths import KINDS, PLACED, STEP, placed, rand, tensors_of
from tests.comfy.weights.test_encodings import coded
from tests.support.accelerator import CPU

LAYERS = 32
"""Layers with the same weight and change: their keys, and so their seeds, differ."""

SIDE = 16


def changes_of(kind: str) -> dict[Any, Any]:
    if kind in PLACED:
        return placed(kind, "weight", (SIDE, SIDE))
    file = {f"x.{name}": tensor for name, tensor in tensors_of(kind, (SIDE, SIDE)).items()}
    return load_lora(file, {"x": "weight"})


def for_layer(number: int, key: Any) -> Any:
    if isinstance(key, str):
        return f"{number}.{key}"
    return (f"{number}.{key[0]}", *key[1:])


def assert_mean_is_exact(shown: torch.Tensor, exact: torch.Tensor, step: torch.Tensor) -> None:
    """Whether the mean over layers [LAYERS, ...] is what it would be without rounding.

    Rounding to the nearest is off by 0.29 steps (root of the mean square); the mean over so many
    seeds by up to 0.5 / sqrt(LAYERS), and by far less over all weights together.

    Args:
        step: Distance of the neighbours of each exact weight.
    """
    off = (shown.double().mean(0) - exact.double()) / step
    assert off.square().mean().sqrt() < 0.5 / LAYERS**0.5 * 1.1
    assert off.abs().max() < 5 * 0.5 / LAYERS**0.5
    assert off.mean().abs() < 5 * 0.5 / (LAYERS * off.numel()) ** 0.5


def steps_at(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance of the neighbours in a type around values within its range."""
    info = torch.finfo(dtype)
    exponent = values.abs().double().clamp(min=info.smallest_normal).log2().floor()
    return 2**exponent * info.eps


STORED = [(dtype, "plain") for dtype in list(STEP)[1:]]
STORED += [(dtype, "scaled") for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)]


@pytest.mark.parametrize(("dtype", "form"), STORED, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, *PLACED])
def test_the_mean_over_seeds_is_the_exact_weight(kind: str, dtype: torch.dtype, form: str) -> None:
    random = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    layers = (ops.disable_weight_init.Linear(SIDE, SIDE, False, dtype=dtype) for _ in range(LAYERS))
    net = nn.Sequential(*layers).requires_grad_(False)
    scale = torch.tensor(1.0)
    if form == "scaled":
        file = coded({"0.weight": rand(SIDE, SIDE)}, "per layer", dtype, prefix="")[0]
        scale = file["0.weight_scale"].reshape(())
        names = [(f"{n}{key[1:]}", tensor) for n in range(LAYERS) for key, tensor in file.items()]
        assign_weights(net, dict(names))
    else:
        for layer in net:
            layer.weight.copy_(rand(SIDE, SIDE))
    stored = net[0].weight.float() * scale
    changes = changes_of(kind)
    view = ModelPatcher(net, CPU, CPU)
    view.add_patches({for_layer(n, key): c for n in range(LAYERS) for key, c in changes.items()})
    exact = calculate_weight(list(view.patches["0.weight"]), stored.clone(), "0.weight")
    end = torch.finfo(dtype).max * scale
    exact = exact.clamp(-end, end)
    view.patch_model(CPU)
    shown = torch.stack([layer.weight.float() * scale for layer in net])
    view.detach()
    if random:
        assert_mean_is_exact(shown, exact, steps_at(exact / scale, dtype) * scale)
    else:  # to the nearest, which needs no seeds
        assert torch.equal(shown, exact.to(dtype).float().expand_as(shown))
