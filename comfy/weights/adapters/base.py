"""What every adapter offers: recognise its tensors in a file, and change a weight by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, overload

import torch

DeltaFunction = Callable[[torch.Tensor], torch.Tensor]
"""Reorders a delta before it is added, for weights stored in another row order."""


def unchanged(delta: torch.Tensor) -> torch.Tensor:
    """The delta function of patches that have none."""
    return delta


class AdapterError(ValueError):
    """An adapter that cannot be applied to a weight; the weight stays as it was."""


class WeightAdapterBase:
    """Low-rank or otherwise compressed change of one weight.

    Attributes:
        name: Kind, as in the table of adapters.
        loaded_keys: File keys the adapter was read from.
        weights: Its tensors and numbers, in an order each kind fixes.
    """

    name: ClassVar[str]

    def __init__(self, loaded_keys: set[str], weights: Any) -> None:
        self.loaded_keys = loaded_keys
        self.weights = weights

    @classmethod
    def load(
        cls,
        x: str,
        lora: Mapping[str, torch.Tensor],
        alpha: float | None,
        dora_scale: torch.Tensor | None,
        loaded_keys: set[str] | None = None,
    ) -> WeightAdapterBase | None:
        """The adapter stored under file key `x`; None, as here, when there is none of this kind.

        Args:
            x: Key prefix in the file.
            lora: The file.
            alpha: Value of `<x>.alpha` when present.
            dora_scale: Tensor of `<x>.dora_scale` when present.
            loaded_keys: Receives the keys used.
        """
        del x, lora, alpha, dora_scale, loaded_keys
        return None

    def calculate_weight(
        self,
        weight: torch.Tensor,
        key: str,
        strength: float,
        strength_model: float,
        offset: tuple[int, int, int] | None,
        function: DeltaFunction,
        intermediate_dtype: torch.dtype = torch.float32,
        original_weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weight changed by `strength` times this adapter.

        Args:
            weight: The running weight, already scaled by `strength_model`; may be changed in
                place.
            key: Its state-dict key, for messages.
            strength: Multiplier of the change.
            strength_model: Multiplier already applied to the weight.
            offset: Slice the weight is of the whole one, for information.
            function: Applied to the delta before it is added.
            intermediate_dtype: Type to compute in.
            original_weight: The unpatched weight, where a caller has it.
        Raises:
            AdapterError: Shapes do not meet.
        """
        del weight, strength, strength_model, offset, function, intermediate_dtype, original_weight
        raise AdapterError(f"'{key}': {type(self).__name__} does not say how it changes a weight")

    def extent(self) -> tuple[int, int | None] | None:
        """(rows, elements) of the weights it fits, where its tensors tell; an unknown number of
        elements is None."""
        return None

    def calculate_shape(self, key: str) -> tuple[int, ...] | None:  # noqa: ARG002
        """Shape the weight has afterwards when it grows, else None."""
        return None


@overload
def moved(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor: ...
@overload
def moved(tensor: None, device: torch.device, dtype: torch.dtype) -> None: ...
def moved(
    tensor: torch.Tensor | None, device: torch.device, dtype: torch.dtype
) -> torch.Tensor | None:
    """A factor on the weight's device in the computing type; None stays None."""
    return None if tensor is None else tensor.to(device=device, dtype=dtype)


def shaped_like(delta: torch.Tensor, weight: torch.Tensor, key: str) -> torch.Tensor:
    """A delta in the weight's shape.

    Raises:
        AdapterError: It has another number of elements.
    """
    if delta.numel() != weight.numel():
        raise AdapterError(
            f"'{key}': change of {tuple(delta.shape)} does not fit weight {tuple(weight.shape)}; "
            "the file was made for another model"
        )
    return delta.reshape(weight.shape)


def take(
    lora: Mapping[str, torch.Tensor], loaded_keys: set[str], *keys: str
) -> list[torch.Tensor | None]:
    """The tensors under the given keys (None where absent), noting which were used."""
    loaded_keys.update(key for key in keys if key in lora)
    return [lora.get(key) for key in keys]
