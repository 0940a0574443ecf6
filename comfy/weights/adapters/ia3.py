"""(IA)^3: every row, or every column, of a weight is scaled by a learned factor.

W' = W * (1 + strength * v), v per output row or, where the file says `on_input`, per input column.
Source: Liu et al. 2022, https://arxiv.org/abs/2205.05638; file layouts of LyCORIS and, without the
1, of PEFT.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from comfy.weights.adapters.base import (
    AdapterError,
    DeltaFunction,
    WeightAdapterBase,
    moved,
    take,
)


class IA3Adapter(WeightAdapterBase):
    """weights = (factors, on_input)."""

    name = "ia3"

    @classmethod
    def load(
        cls,
        x: str,
        lora: Mapping[str, torch.Tensor],
        alpha: float | None,  # noqa: ARG003 - files of this kind have neither
        dora_scale: torch.Tensor | None,  # noqa: ARG003
        loaded_keys: set[str] | None = None,
    ) -> IA3Adapter | None:
        """See the base class."""
        if f"{x}.ia3_l" in lora:
            return cls._of_peft(f"{x}.ia3_l", lora, loaded_keys)
        if f"{x}.on_input" not in lora or f"{x}.weight" not in lora:
            return None
        used = set() if loaded_keys is None else loaded_keys
        factors, on_input = take(lora, used, f"{x}.weight", f"{x}.on_input")
        assert on_input is not None
        return cls(used, (factors, bool(on_input.any())))

    @classmethod
    def _of_peft(
        cls, key: str, lora: Mapping[str, torch.Tensor], loaded_keys: set[str] | None
    ) -> IA3Adapter:
        """The factors themselves, [1, in] of inputs or [out, 1] of outputs.

        For a convolution there are kernel axes of 1 beside, and both kinds may be [1, n]: the
        file's settings tell them apart (`adapter_settings`).
        """
        used = set() if loaded_keys is None else loaded_keys
        (factors,) = take(lora, used, key)
        assert factors is not None
        on_input = factors.ndim > 1 and factors.shape[0] == 1 and factors.shape[1] > 1
        return cls(used, (factors.float() - 1.0, on_input))

    def extent(self) -> tuple[int, int | None] | None:
        """See the base class; factors of inputs do not tell the outputs."""
        factors, on_input = self.weights
        return None if on_input else (factors.numel(), None)

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
        factors, on_input = self.weights
        axis = 1 if on_input else 0
        if weight.ndim <= axis or factors.numel() != weight.shape[axis]:
            raise AdapterError(
                f"'{key}': {factors.numel()} factors of (IA)^3 do not fit axis {axis} of weight "
                f"{tuple(weight.shape)}"
            )
        shape = [1] * weight.ndim
        shape[axis] = -1
        scale = moved(factors, weight.device, intermediate_dtype).reshape(shape)
        if not on_input:  # the factors are in the row order of the file
            scale = function(scale)
        return weight.add_((weight.to(intermediate_dtype) * scale * strength).to(weight.dtype))
