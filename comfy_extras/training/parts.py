"""The changes of a whole network that are trained together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comfy.ops.encoded import weight_shape
from comfy_extras.training.factors import (
    ALGORITHMS,
    DIFFERENCES,
    Tensors,
    Trained,
    TrainedAdapter,
    TrainedDifference,
    adapter_of,
)

NETWORK = "diffusion_model"


@dataclass(frozen=True)
class AdapterPlan:
    """What is to be trained.

    Attributes:
        algorithm: Row of the table of kinds.
        rank: Of new factors.
        dtype: Type that they are kept in.
        seed: Of their first values.
        existing: Tensors to go on with, by weight, then by name.
    """

    algorithm: str
    rank: int
    dtype: torch.dtype
    seed: int
    existing: dict[str, Tensors]


def castable_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The network's layers that let functions change their weights, by name in the model."""
    for name, layer in getattr(model, NETWORK).named_modules(prefix=NETWORK):
        if hasattr(layer, "weight_function") and getattr(layer, "weight", None) is not None:
            yield name, layer


class TrainedParts:
    """A trained change for every weight and bias of a network's layers.

    Args:
        patcher: View of the model; the changes are added to it.
        plan: What is to be trained.
    """

    def __init__(self, patcher: Any, plan: AdapterPlan) -> None:
        self.plan = plan
        self.by_prefix: list[tuple[str, Trained]] = []
        self._generator = torch.Generator().manual_seed(plan.seed)
        for name, layer in castable_layers(patcher.model):
            given = plan.existing.get(f"{name}.weight", {})
            self._add(patcher, name, "weight", self._of_weight(name, layer, given))
            if getattr(layer, "bias", None) is not None:
                first = given.get("diff_b", torch.zeros(layer.bias.shape))
                change = TrainedDifference("diff_b", first, plan.dtype)
                self._add(patcher, name, "bias", change)

    def _of_weight(self, name: str, layer: Any, given: Tensors) -> Trained:
        shape = weight_shape(layer)
        factors = {key: tensor for key, tensor in given.items() if key not in DIFFERENCES}
        if len(shape) < 2 or "diff" in given:
            return TrainedDifference("diff", given.get("diff", torch.zeros(shape)), self.plan.dtype)
        key = f"{name}.weight"
        if factors and adapter_of(factors) is None:
            raise ValueError(
                f"existing_lora: no adapter is known that has {', '.join(sorted(factors))}, as the "
                f"file has for {key!r}"
            )
        if not factors:
            rank = min(self.plan.rank, shape[0], math.prod(shape[1:]))
            factors = ALGORITHMS[self.plan.algorithm](shape, rank, self._generator)
        return TrainedAdapter(key, factors, self.plan.dtype)

    def _add(self, patcher: Any, name: str, which: str, change: Trained) -> None:
        change.to(patcher.load_device)
        patcher.add_weight_wrapper(f"{name}.{which}", change)
        self.by_prefix.append((name, change))

    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        return [value for _, change in self.by_prefix for value in change.parameters()]

    def file_tensors(self) -> dict[str, Tensor]:
        """The LoRA file's tensors, on the CPU."""
        return {
            f"{prefix}.{name}": tensor.detach().to("cpu", copy=True).contiguous()
            for prefix, change in self.by_prefix
            for name, tensor in change.file_tensors().items()
        }
