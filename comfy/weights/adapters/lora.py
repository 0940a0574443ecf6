"""LoRA: a delta that is the product of two thin matrices, optionally with a core and DoRA.

delta = alpha/rank * up @ down; for convolutions with a core (`mid`) the down part is first
contracted with it. Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
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
    unchanged,
)
from comfy.weights.adapters.dora import add_delta, rescale_rows

SPELLINGS = (
    ("lora_up.weight", "lora_down.weight", "lora_mid.weight"),
    ("_lora.up.weight", "_lora.down.weight", None),
    ("lora_B.weight", "lora_A.weight", None),
    ("lora.up.weight", "lora.down.weight", None),
    ("lora_B", "lora_A", None),
    ("lora_linear_layer.up.weight", "lora_linear_layer.down.weight", None),
    ("lora_B.default.weight", "lora_A.default.weight", None),
)
"""Names of (up, down, core) after the key prefix; all but the second follow a dot."""

MAGNITUDES = (
    "lora_magnitude_vector", "lora_magnitude_vector.weight", "lora_magnitude_vector.default",
    "lora_magnitude_vector.default.weight",
)  # fmt: skip
"""Names under which PEFT writes the magnitudes of DoRA; they belong to rows of the changed weight.
"""


class LoRAAdapter(WeightAdapterBase):
    """weights = (up [out, r], down [r, in], alpha, mid or None, dora_scale or None, reshape).

    Attributes:
        rows_of_sum: `dora_scale` holds magnitudes [out] of the rows of weight + delta, as PEFT
            trains them; without it, its shape tells what it is.
    """

    name = "lora"
    rows_of_sum = False

    @classmethod
    def load(
        cls,
        x: str,
        lora: Mapping[str, torch.Tensor],
        alpha: float | None,
        dora_scale: torch.Tensor | None,
        loaded_keys: set[str] | None = None,
    ) -> LoRAAdapter | None:
        """See the base class."""
        used = set() if loaded_keys is None else loaded_keys
        embedding = _embedding(x, lora, alpha, used)
        if embedding is not None:
            return embedding
        for up_name, down_name, mid_name in SPELLINGS:
            joint = "" if up_name.startswith("_") else "."
            if x + joint + up_name not in lora:
                continue
            up, down = take(lora, used, x + joint + up_name, x + joint + down_name)
            mid = take(lora, used, f"{x}.{mid_name}")[0] if mid_name else None
            (shape,) = take(lora, used, f"{x}.reshape_weight")
            grown = tuple(int(n) for n in shape.tolist()) if shape is not None else None
            magnitude = next((name for m in MAGNITUDES if (name := f"{x}.{m}") in lora), None)
            if magnitude is not None:
                (dora_scale,) = take(lora, used, magnitude)
            found = cls(used, (up, down, alpha, mid, dora_scale, grown))
            found.rows_of_sum = magnitude is not None
            return found
        return None

    def calculate_shape(self, key: str) -> tuple[int, ...] | None:  # noqa: ARG002
        """See the base class."""
        return self.weights[5]

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
        dora_scale, grown = self.weights[4:]
        up, down, scale = self.factors(weight.device, intermediate_dtype, key)
        if grown is not None:
            weight = pad_to_shape(weight, grown)
        self._check(up, down, weight, key)
        if dora_scale is None and function is unchanged and _writes_in_place(weight, up, down):
            weight.flatten(start_dim=1).addmm_(up, down, alpha=strength * scale)
            return weight
        delta = shaped_like(up @ down, weight, key)
        if self.rows_of_sum and dora_scale is not None:
            return rescale_rows(weight, delta * scale, strength, dora_scale, function)
        return add_delta(weight, delta, scale, strength, dora_scale, function, intermediate_dtype)

    def extent(self) -> tuple[int, int | None] | None:
        """See the base class."""
        up, down, _, mid, _, grown = self.weights
        if up is None or down is None or up.ndim < 2 or down.ndim < 2:
            return None
        if grown is not None:
            return grown[0], None
        columns = down.shape[1] * mid[0, 0].numel() if mid is not None else down[0].numel()
        return up.shape[0], up.shape[0] * columns

    def is_plain_product(self) -> bool:
        """Whether the change is a product of two matrices and nothing else."""
        return self.weights[4] is None and self.weights[5] is None

    def factors(
        self, device: torch.device, dtype: torch.dtype, key: str
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """(up [out, r], down [r, in * kernel], alpha over rank), with the core contracted in.

        Raises:
            AdapterError: One of the two is missing.
        """
        up, down, alpha, mid = self.weights[:4]
        up, down = moved(up, device, dtype), moved(down, device, dtype)
        if up is None or down is None:
            raise AdapterError(f"'{key}': the file has only one of the two LoRA factors")
        scale = 1.0 if alpha is None else alpha / down.shape[0]
        if mid is not None:
            down = contract_core(moved(mid, device, dtype), down)
        return up.flatten(start_dim=1), down.flatten(start_dim=1), scale

    @staticmethod
    def _check(up: torch.Tensor, down: torch.Tensor, weight: torch.Tensor, key: str) -> None:
        fits = up.shape[1] == down.shape[0] and up.shape[0] * down.shape[1] == weight.numel()
        if not fits:
            raise AdapterError(
                f"'{key}': LoRA factors {tuple(up.shape)} x {tuple(down.shape)} do not fit weight "
                f"{tuple(weight.shape)}; the file was made for another model"
            )


def _embedding(
    x: str, lora: Mapping[str, torch.Tensor], alpha: float | None, used: set[str]
) -> LoRAAdapter | None:
    """PEFT's change of an embedding table, whose factors are stored turned round.

    Its magnitudes, if any, are lengths of the columns of the changed table.
    """
    names = (f"{x}.lora_embedding_A", f"{x}.lora_embedding_B")
    if names[0] not in lora:
        names = (f"{names[0]}.default", f"{names[1]}.default")
    if any(name not in lora or lora[name].ndim != 2 for name in names):
        return None
    up, down = (tensor.t() for tensor in take(lora, used, *names) if tensor is not None)
    found = next((name for m in MAGNITUDES if (name := f"{x}.{m}") in lora), None)
    lengths = take(lora, used, found)[0] if found is not None else None
    columns = None if lengths is None else lengths.reshape(1, -1)
    return LoRAAdapter(used, (up, down, alpha, None, columns, None))


def _writes_in_place(weight: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether the product can be added into the weight's own memory."""
    return (
        weight.is_contiguous()
        and weight.dtype == up.dtype
        and weight.ndim >= 2
        and weight.shape[0] == up.shape[0]
        and down.shape[1] == weight.numel() // weight.shape[0]
    )


def contract_core(mid: torch.Tensor | None, down: torch.Tensor) -> torch.Tensor:
    """The down part with the core contracted in: [q, in, *kernel] from mid [q, r, *kernel]."""
    assert mid is not None
    wide = [down.shape[1], mid.shape[0], *mid.shape[2:]]
    product = down.transpose(0, 1).flatten(start_dim=1) @ mid.transpose(0, 1).flatten(start_dim=1)
    return product.reshape(wide).transpose(0, 1)


def pad_to_shape(weight: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The weight in the leading corner of a larger, otherwise zero tensor.

    Raises:
        AdapterError: The new shape is smaller somewhere or has other axes.
    """
    if tuple(weight.shape) == tuple(shape):
        return weight
    if len(shape) != weight.ndim or any(new < old for new, old in zip(shape, weight.shape)):
        raise AdapterError(f"weight {tuple(weight.shape)} cannot be padded to {tuple(shape)}")
    grown = torch.zeros(shape, device=weight.device, dtype=weight.dtype)
    grown[tuple(slice(0, n) for n in weight.shape)] = weight
    return grown
