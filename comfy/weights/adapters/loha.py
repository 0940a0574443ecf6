"""LoHa: a delta that is the elementwise product of two low-rank matrices.

delta = alpha/rank * (w1_a @ w1_b) * (w2_a @ w2_b), each with an optional Tucker core for
convolutions. Source: Hyeon-Woo et al. 2021, https://arxiv.org/abs/2108.06098.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from comfy.weights.adapters.base import (
    AdapterError,
    DeltaFunction,
    WeightAdapterBase,
    moved,
    shaped_like,
    take,
)
from comfy.weights.adapters.dora import add_delta


def tucker(core: torch.Tensor, outer: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """[out, in, *kernel] from core [r, r, *kernel], outer [r, out] and inner [r, in]."""
    return torch.einsum("i j ..., j r, i p -> p r ...", core, inner, outer)


class LoHaAdapter(WeightAdapterBase):
    """weights = (w1_a, w1_b, alpha, w2_a, w2_b, t1 or None, t2 or None, dora_scale or None)."""

    name = "loha"

    @classmethod
    def load(
        cls,
        x: str,
        lora: Mapping[str, torch.Tensor],
        alpha: float | None,
        dora_scale: torch.Tensor | None,
        loaded_keys: set[str] | None = None,
    ) -> LoHaAdapter | None:
        """See the base class."""
        if f"{x}.hada_w1_a" not in lora:
            return None
        used = set() if loaded_keys is None else loaded_keys
        names = ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")
        w1a, w1b, w2a, w2b, t1, t2 = take(lora, used, *(f"{x}.hada_{name}" for name in names))
        return cls(used, (w1a, w1b, alpha, w2a, w2b, t1, t2, dora_scale))

    def extent(self) -> tuple[int, int | None] | None:
        """See the base class."""
        w1a, w1b, _, _, _, t1, *_ = self.weights
        if w1b is None or w1a.ndim != 2 or w1b.ndim != 2:
            return None
        rows = w1a.shape[0] if t1 is None else w1a.shape[1]
        kernel = 1 if t1 is None or t1.ndim < 3 else t1[0, 0].numel()
        return rows, rows * w1b.shape[1] * kernel

    def calculate_weight(
        self,
        weight: torch.Tensor,
        key: str,
        strength: float,
        strength_model: float,  # noqa: ARG002
        offset: tuple[int, int, int] | None,  # noqa: ARG002
        function: DeltaFunction,
        intermediate_dtype: torch.dtype = torch.float32,
        original_weight: torch.Tensor | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """See the base class."""
        w1a, w1b, alpha, w2a, w2b, t1, t2, dora_scale = self.weights
        if w1b is None or w2a is None or w2b is None:
            raise AdapterError(f"'{key}': the file lacks one of the four LoHa factors")
        scale = 1.0 if alpha is None else alpha / w1b.shape[0]
        halves = []
        for core, a, b in ((t1, w1a, w1b), (t2, w2a, w2b)):
            outer = moved(a, weight.device, intermediate_dtype)
            inner = moved(b, weight.device, intermediate_dtype)
            if core is None:
                halves.append(outer @ inner)
            else:
                centre = moved(core, weight.device, intermediate_dtype)
                halves.append(tucker(centre, outer, inner))
        delta = shaped_like(halves[0] * halves[1], weight, key)
        return add_delta(weight, delta, scale, strength, dora_scale, function, intermediate_dtype)
