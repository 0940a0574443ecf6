"""Random chains of patches, in every storage type, layout and shape, against float64.

Each chain must give the same bits put in the weight's place and applied at use, and be undone.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from comfy.patching.lowvram import LowVramPatch
from comfy.patching.patcher import ModelPatcher
from comfy.weights.adapters import LoRAAdapter

CPU = torch.device("cpu")
SPACING = {
    torch.float64: 2**-21,  # computed in float32 like all others
    torch.float32: 2**-21,
    torch.float16: 2**-10,
    torch.bfloat16: 2**-7,
    torch.float8_e4m3fn: 2**-3,
    torch.float8_e5m2: 2**-2,
}
"""Largest step between neighbours of a type, relative to their size."""

SMALLEST = {torch.float8_e4m3fn: 2**-9, torch.float8_e5m2: 2**-15}
FACTORS = (torch.float32, torch.float16, torch.bfloat16)


class Chain:
    """A weight and random patches of it.

    Attributes:
        weight: The unpatched weight.
        patches: (key, change, strength, strength of the weight), for `add_patches`.
        exact: The patched weight in float64.
        size: Sum of the magnitudes that were added to each element, which bounds the rounding.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        torch.manual_seed(seed)
        self.rng = random.Random(seed)
        axes = self.rng.choice([1, 2, 2, 3, 4, 4, 5])
        inner = (self.rng.randint(1, 30), *(self.rng.choice([1, 2, 3]) for _ in range(axes - 2)))
        self.shape = (self.rng.randint(1, 40), *inner[: axes - 1])
        self.weight = self._laid_out(torch.randn(self.shape).to(dtype))
        self.exact = self.weight.double().clone()
        self.size = self.exact.abs()
        self.patches = [self._patch() for _ in range(self.rng.randint(1, 4))]

    def _laid_out(self, weight: Tensor) -> Tensor:
        way = self.rng.random()
        if weight.ndim == 4 and way < 0.4:
            return weight.contiguous(memory_format=torch.channels_last)
        if weight.ndim == 2 and way < 0.2:
            return weight.t().contiguous().t()
        return weight

    def _patch(self) -> tuple[Any, Any, float, float]:
        strength = self.rng.choice([1.0, 0.0, -0.7, 2.5, 1])
        strength_model = self.rng.choice([1.0, 1.0, 1, 0.0, -0.5, 0.3])
        offset, function, shape = None, None, self.shape
        if self.rng.random() < 0.3:
            axis = self.rng.randrange(len(shape))
            start = self.rng.randrange(shape[axis])
            offset = (axis, start, self.rng.randint(1, shape[axis] - start))
            shape = tuple(offset[2] if i == axis else n for i, n in enumerate(shape))
        kind = self.rng.choice(["lora", "lora", "lora", "diff", "set"])
        if kind != "set" and self.rng.random() < 0.15:
            function = _flipped
        change, delta = self._lora(shape) if kind == "lora" else _plain(kind, shape)
        part, size = (t if offset is None else t.narrow(*offset) for t in (self.exact, self.size))
        part *= strength_model
        size *= abs(strength_model)
        if kind == "set":
            part.copy_(delta)
            size.copy_(delta.abs())
        else:
            added = (function or (lambda d: d))(delta * strength)
            part += added
            size += added.abs()
        plain = offset is None and function is None
        return "w" if plain else ("w", offset, function), change, strength, strength_model

    def _lora(self, shape: tuple[int, ...]) -> tuple[LoRAAdapter, Tensor]:
        rank, dtype, ones = self.rng.randint(1, 6), self.rng.choice(FACTORS), [1] * (len(shape) - 2)
        alpha = self.rng.choice([None, 0.0, 1.0, -2.0, 7.5])
        mid = None
        if len(shape) == 4 and self.rng.random() < 0.3:
            up = torch.randn(shape[0], 3, 1, 1).to(dtype)
            down = torch.randn(rank, shape[1], 1, 1).to(dtype)
            mid = torch.randn(3, rank, *shape[2:]).to(dtype)
            factors = (up.double().flatten(1), mid.double(), down.double().flatten(1))
            delta = torch.einsum("or,rqhw,qi->oihw", *factors)
        else:
            flat = self.rng.random() < 0.3
            inner = [torch.Size(shape[1:]).numel()] if flat or len(shape) == 1 else shape[1:]
            up = torch.randn(shape[0], rank, *([] if flat else ones)).to(dtype)
            down = torch.randn(rank, *inner).to(dtype)
            delta = (up.double().flatten(1) @ down.double().flatten(1)).reshape(shape)
        scale = 1.0 if alpha is None else alpha / rank
        return LoRAAdapter(set(), (up, down, alpha, mid, None, None)), delta * scale


def _plain(kind: str, shape: tuple[int, ...]) -> tuple[Any, Tensor]:
    change = torch.randn(shape)
    return (kind, (change,)), change.double()


def _flipped(delta: Tensor) -> Tensor:
    return delta.flip(0)


@pytest.mark.parametrize("dtype", SPACING, ids=str)
@pytest.mark.parametrize("seed", range(25))
def test_a_chain_gives_its_formula_on_every_path_and_is_undone(
    seed: int, dtype: torch.dtype
) -> None:
    chain = Chain(seed, dtype)
    model = nn.Module()
    model.w = nn.Parameter(chain.weight, requires_grad=False)
    before, values = model.w, chain.weight.double().clone()
    patcher = ModelPatcher(model, CPU, CPU)
    for key, change, strength, strength_model in chain.patches:
        assert patcher.add_patches({key: change}, strength, strength_model) == [key]
    at_use = LowVramPatch("w", patcher.patches)(chain.weight)
    patcher.patch_model(CPU)
    shown = model.w.detach()
    patcher.unpatch_model()
    assert (shown.dtype, shown.shape) == (dtype, chain.shape)
    assert torch.equal(shown.double(), at_use.double())
    limit = torch.finfo(dtype).max
    wanted = chain.exact.clamp(-limit, limit)
    bound = SPACING[dtype] * wanted.abs() + 6e-6 * chain.size + SMALLEST.get(dtype, 1e-6)
    assert bool(((shown.double() - wanted).abs() <= bound).all())
    assert model.w is before
    assert torch.equal(model.w.double(), values)
