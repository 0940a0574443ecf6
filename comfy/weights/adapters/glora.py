"""GLoRA: a delta with a part that depends on the weight itself.

delta = alpha/rank * (B + W A), A = a1 @ a2 and B = b1 @ b2 (in an older layout the factors come in
the opposite order). Source: Chavan et al. 2023, https://arxiv.org/abs/2306.07967.
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


class GLoRAAdapter(WeightAdapterBase):
    """weights = (a1, a2, b1, b2, alpha, dora_scale or None)."""

    name = "glora"

    @classmethod
    def load(
        cls,
        x: str,
        lora: Mapping[str, torch.Tensor],
        alpha: float | None,
        dora_scale: torch.Tensor | None,
        loaded_keys: set[str] | None = None,
    ) -> GLoRAAdapter | None:
        """See the base class."""
        if f"{x}.a1.weight" not in lora:
            return None
        used = set() if loaded_keys is None else loaded_keys
        parts = take(lora, used, *(f"{x}.{name}.weight" for name in ("a1", "a2", "b1", "b2")))
        return cls(used, (*parts, alpha, dora_scale))

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
        *parts, alpha, dora_scale = self.weights
        if any(part is None for part in parts):
            raise AdapterError(f"'{key}': the file lacks one of the four GLoRA factors")
        old, rank = _layout(parts, weight, key)
        scale = 1.0 if alpha is None else alpha / rank
        a1, a2, b1, b2 = (
            moved(part.flatten(start_dim=1), weight.device, intermediate_dtype) for part in parts
        )
        running = weight.to(intermediate_dtype)
        if old:
            delta = b2 @ b1 + (running.flatten(start_dim=1) @ a2) @ a1
        else:
            mixed = torch.einsum("o i ..., i j -> o j ...", running, a1)
            mixed = torch.einsum("o i ..., i j -> o j ...", mixed, a2)
            delta = mixed + shaped_like(b1 @ b2, weight, key)
        delta = shaped_like(delta, weight, key)
        return add_delta(weight, delta, scale, strength, dora_scale, function, intermediate_dtype)


def _layout(parts: list[torch.Tensor], weight: torch.Tensor, key: str) -> tuple[bool, int]:
    """(older layout, rank), told from which sizes agree.

    Raises:
        AdapterError: Neither layout fits.
    """
    a1, a2, b1, b2 = parts
    could_be_old = b2.shape[1] == b1.shape[0] == a1.shape[0] == a2.shape[1]
    could_be_new = b2.shape[0] == b1.shape[1] == a1.shape[1] == a2.shape[0]
    square = weight.shape[0] == weight.shape[1]
    if could_be_new and not (could_be_old and square and a2.shape[0] == weight.shape[0]):
        return False, a2.shape[0]
    if could_be_old:
        return True, a1.shape[0]
    raise AdapterError(f"'{key}': GLoRA factors {[tuple(p.shape) for p in parts]} do not fit")
