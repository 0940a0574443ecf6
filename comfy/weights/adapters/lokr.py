"""LoKr: a delta that is the Kronecker product of a small and a (possibly low-rank) large factor.

delta = scale * kron(w1, w2); scale is alpha/rank when a factor is stored factorised, else 1.
Source: Yeh et al. 2023 (LyCORIS), https://arxiv.org/abs/2309.14859.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from comfy.weights.adapters.loha import tucker


class LoKrAdapter(WeightAdapterBase):
    """weights = (w1, w2, alpha, w1_a, w1_b, w2_a, w2_b, t2, dora_scale); absent parts are None."""

    name = "lokr"

    @classmethod
    def load(
        cls,
        x: str,
        lora: Mapping[str, torch.Tensor],
        alpha: float | None,
        dora_scale: torch.Tensor | None,
        loaded_keys: set[str] | None = None,
    ) -> LoKrAdapter | None:
        """See the base class."""
        used = set() if loaded_keys is None else loaded_keys
        names = ("w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b", "t2")
        w1, w2, w1a, w1b, w2a, w2b, t2 = take(lora, used, *(f"{x}.lokr_{name}" for name in names))
        if w1 is None and w2 is None and w1a is None and w2a is None:
            return None
        return cls(used, (w1, w2, alpha, w1a, w1b, w2a, w2b, t2, dora_scale))

    def extent(self) -> tuple[int, int | None] | None:
        """See the base class."""
        w1, w2, _, w1a, w1b, w2a, w2b, t2, _ = self.weights
        sides = (_side(w1, w1a, w1b, None), _side(w2, w2a, w2b, t2))
        if None in sides:
            return None
        (rows, count), (more_rows, more) = sides  # type: ignore[misc]
        return rows * more_rows, count * more

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
        w1, w2, alpha, w1a, w1b, w2a, w2b, t2, dora_scale = self.weights

        def ready(tensor: Any) -> Any:
            return moved(tensor, weight.device, intermediate_dtype)

        rank: int | None = None
        if w1 is None:
            _require(w1a, w1b, key)
            rank, w1 = w1b.shape[0], ready(w1a) @ ready(w1b)
        if w2 is None:
            _require(w2a, w2b, key)
            rank = w2b.shape[0]
            w2 = tucker(ready(t2), ready(w2a), ready(w2b)) if t2 is not None else (
                ready(w2a) @ ready(w2b)
            )  # fmt: skip
        w1, w2 = ready(w1), ready(w2)
        w1 = w1.reshape(*w1.shape, *(1,) * (w2.ndim - w1.ndim))  # has no kernel of its own
        scale = 1.0 if alpha is None or rank is None else alpha / rank
        delta = shaped_like(torch.kron(w1, w2.contiguous()), weight, key)
        return add_delta(weight, delta, scale, strength, dora_scale, function, intermediate_dtype)


def _side(
    whole: torch.Tensor | None,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    core: torch.Tensor | None,
) -> tuple[int, int] | None:
    """(rows, elements) of one factor."""
    if whole is not None:
        return (whole.shape[0], whole.numel()) if whole.ndim >= 2 else None
    if a is None or b is None or a.ndim < 2 or b.ndim < 2:
        return None
    if core is None:
        return a.shape[0], a.shape[0] * b[0].numel()
    return a.shape[1], a.shape[1] * b.shape[1] * (core[0, 0].numel() if core.ndim > 2 else 1)


def _require(a: torch.Tensor | None, b: torch.Tensor | None, key: str) -> None:
    if a is None or b is None:
        raise AdapterError(f"'{key}': the file lacks a part of one LoKr factor")
