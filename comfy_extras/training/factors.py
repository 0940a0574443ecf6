"""What is trained of a weight: an adapter's tensors, or a plain difference.

The tensors have the names that they have in a file, and the kinds of adapter that files are read
by say how they change the weight: what is trained is what a loaded file does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from comfy.weights.adapters import ADAPTERS, WeightAdapterBase
from comfy.weights.adapters.base import unchanged
from comfy.weights.lora import model_lora_keys_unet

Tensors = dict[str, Tensor]
CONSTANTS = ("alpha", "reshape_weight")  # stored with the factors, but not trained
DIFFERENCES = ("diff", "diff_b")
ALPHA = 1.0


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers that keep the size of what a layer [out, in] of them is given."""
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    return (torch.rand(shape, generator=generator) * 2 - 1) * bound


def normal(shape: tuple[int, ...], generator: torch.Generator, deviation: float = 1.0) -> Tensor:
    """Normally distributed numbers."""
    return torch.randn(shape, generator=generator) * deviation


def split(size: int, most: int) -> tuple[int, int]:
    """The two factors of a size whose first is as large as possible, but not above `most`."""
    first = next(part for part in range(min(size, most), 0, -1) if size % part == 0)
    return first, size // first


def lora(shape: tuple[int, ...], rank: int, generator: torch.Generator) -> Tensors:
    """Two factors, of which the second is zero."""
    kernel = shape[2:]
    return {
        "lora_up.weight": torch.zeros(shape[0], rank, *(1,) * len(kernel)),
        "lora_down.weight": uniform((rank, *shape[1:]), generator),
        "alpha": torch.tensor(ALPHA),
    }


def loha(shape: tuple[int, ...], rank: int, generator: torch.Generator) -> Tensors:
    """Two products, of which the second is zero."""
    inner = math.prod(shape[1:])
    return {
        "hada_w1_a": normal((shape[0], rank), generator, 0.1),
        "hada_w1_b": normal((rank, inner), generator),
        "hada_w2_a": torch.zeros(shape[0], rank),
        "hada_w2_b": normal((rank, inner), generator),
        "alpha": torch.tensor(ALPHA),
    }


def lokr(shape: tuple[int, ...], rank: int, generator: torch.Generator) -> Tensors:
    """A small factor, and a large one that is zero and itself a product where that is smaller."""
    most = math.isqrt(max(shape[:2]))
    (out_small, out_large), (in_small, in_large) = (split(size, most) for size in shape[:2])
    inner = in_large * math.prod(shape[2:])
    made = {"lokr_w1": uniform((out_small, in_small), generator)}
    if rank * (out_large + inner) >= out_large * inner:
        return {**made, "lokr_w2": torch.zeros(out_large, in_large, *shape[2:])}
    return {
        **made,
        "lokr_w2_a": torch.zeros(out_large, rank),
        "lokr_w2_b": uniform((rank, inner), generator),
        "alpha": torch.tensor(ALPHA),
    }


def oft(shape: tuple[int, ...], rank: int, generator: torch.Generator) -> Tensors:  # noqa: ARG001
    """Blocks of `rank` rows, at most, that are not rotated yet."""
    size, count = split(shape[0], rank)
    return {"oft_blocks": torch.zeros(count, size, size)}


ALGORITHMS: dict[str, Callable[[tuple[int, ...], int, torch.Generator], Tensors]] = {
    "LoRA": lora,
    "LoHa": loha,
    "LoKr": lokr,
    "OFT": oft,
}


def adapter_of(tensors: Mapping[str, Tensor]) -> WeightAdapterBase | None:
    """The adapter that tensors of one weight make, by their names in a file without prefix."""
    named = {f"w.{name}": tensor for name, tensor in tensors.items()}
    alpha = tensors.get("alpha")
    scale = None if alpha is None else float(alpha)
    dora = tensors.get("dora_scale")
    found = (kind.load("w", named, scale, dora, set()) for kind in ADAPTERS)
    return next((one for one in found if one is not None), None)


class TrainedAdapter(nn.Module):
    """Changes a weight by an adapter whose tensors are trained.

    Args:
        key: The weight's state-dict key, for messages.
        tensors: By their names in a file, without prefix.
        dtype: Type that they are kept and trained in.
    """

    def __init__(self, key: str, tensors: Tensors, dtype: torch.dtype) -> None:
        super().__init__()
        self.key = key
        self.constants = {name: tensors[name] for name in CONSTANTS if name in tensors}
        self.trained = {
            name: nn.Parameter(tensor.to(dtype, copy=True))
            for name, tensor in tensors.items()
            if name not in CONSTANTS
        }
        for number, parameter in enumerate(self.trained.values()):
            self.register_parameter(f"trained_{number}", parameter)

    def forward(self, weight: Tensor) -> Tensor:
        """The changed weight, in single precision; the given one is not modified."""
        adapter = adapter_of({**self.trained, **self.constants})
        assert adapter is not None
        copy = weight.to(torch.float32, copy=True)
        return adapter.calculate_weight(copy, self.key, 1.0, 1.0, None, unchanged)

    def file_tensors(self) -> Tensors:
        """What a file holds of it, by names without prefix."""
        return {**self.trained, **self.constants}


class TrainedDifference(nn.Module):
    """Adds a difference that is trained to a weight of one axis, or to a bias.

    Args:
        name: Its name in a file, without prefix.
        difference: Its first value.
        dtype: Type that it is kept and trained in.
    """

    def __init__(self, name: str, difference: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.name = name
        self.difference = nn.Parameter(difference.to(dtype, copy=True))

    def forward(self, weight: Tensor) -> Tensor:
        """The changed weight, in single precision; the given one is not modified."""
        return weight.to(torch.float32) + self.difference.to(torch.float32)

    def file_tensors(self) -> Tensors:
        """What a file holds of it, by names without prefix."""
        return {self.name: self.difference}


Trained = TrainedAdapter | TrainedDifference


def by_weight(file: Mapping[str, Tensor], model: Any) -> dict[str, Tensors]:
    """A LoRA file's tensors by weight of the model, then by name without prefix.

    Raises:
        ValueError: None belongs to the model, or one to a part of a weight only.
    """
    names = model_lora_keys_unet(model, {})
    found: dict[str, Tensors] = {}
    for key, tensor in file.items():
        places = [place for place, letter in enumerate(key) if letter == "."]
        prefix = next((key[:place] for place in places if key[:place] in names), None)
        if prefix is None:
            continue
        target = names[prefix]
        if not isinstance(target, str):
            raise ValueError(
                f"existing_lora: {prefix!r} changes a part of {target[0]!r} only; training goes on "
                "with files that were trained here"
            )
        found.setdefault(target, {})[key[len(prefix) + 1 :]] = tensor
    if file and not found:
        example = next(iter(file))
        raise ValueError(
            f"existing_lora: expected a LoRA of this model, found one without a weight of it "
            f"(its keys are such as {example!r})"
        )
    return found
