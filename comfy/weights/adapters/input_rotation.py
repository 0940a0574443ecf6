"""OFT and BOFT as the PEFT library writes them: the inputs of a layer are rotated, not its outputs.

W' = W R^T with R orthogonal and made of blocks, and in BOFT s * (W R^T) with a scale s of each
output. A convolution's inputs are those of a whole kernel. Sources as in `oft`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from comfy.weights.adapters.base import (
    AdapterError,
    DeltaFunction,
    WeightAdapterBase,
    moved,
    take,
)

TERMS = 5
"""Terms of the series that stands for Cayley's inverse, where the settings do not tell."""


class _InputRotation(WeightAdapterBase):
    """What both kinds do with the weight that their rotation gives."""

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
        running = weight.to(intermediate_dtype).flatten(start_dim=1)
        blocks = self.blocks(running.shape[1], running.device)
        inputs = blocks.shape[-3] * blocks.shape[-1]
        if inputs != running.shape[1]:
            raise AdapterError(
                f"'{key}': blocks that rotate {inputs} inputs do not fit weight "
                f"{tuple(weight.shape)}; the file was made for another model"
            )
        changed = running
        for stage, turn in enumerate(blocks.to(intermediate_dtype)):
            changed = _rotate(changed, turn, stage if len(blocks) > 1 else None)
        changed = self.scaled(changed, key, function)
        return weight.add_(((changed - running) * strength).reshape(weight.shape).to(weight.dtype))

    def blocks(self, inputs: int, device: torch.device) -> torch.Tensor:
        """Rotations [stages, k, b, b] of so many inputs, in float32; each kind makes its own."""
        return torch.ones(1, inputs, 1, 1, device=device)

    def scaled(self, rotated: torch.Tensor, key: str, function: DeltaFunction) -> torch.Tensor:
        """The rotated weight [out, in] with the scales of its outputs; here there are none."""
        del key, function
        return rotated


class InputOFTAdapter(_InputRotation):
    """weights = (upper triangles [k, b (b - 1) / 2] of skew-symmetric blocks, terms).

    With terms above 0 the rotation is the Neumann series of (I + Q)(I - Q)^-1 cut after so many of
    them; with 0 it is exactly (I - Q)(I + Q)^-1. One triangle alone stands for all blocks.
    """

    name = "oft_of_inputs"

    @classmethod
    def load(
        cls,
        x: str,
        lora: Mapping[str, torch.Tensor],
        alpha: float | None,  # noqa: ARG003 - files of this kind have neither
        dora_scale: torch.Tensor | None,  # noqa: ARG003
        loaded_keys: set[str] | None = None,
    ) -> InputOFTAdapter | None:
        """See the base class."""
        triangles = lora.get(f"{x}.oft_R.weight")
        if triangles is None or triangles.ndim != 2:
            return None
        used = set() if loaded_keys is None else loaded_keys
        triangles, terms = take(lora, used, f"{x}.oft_R.weight", f"{x}.oft_terms")
        return cls(used, (triangles, TERMS if terms is None else int(terms)))

    def blocks(self, inputs: int, device: torch.device) -> torch.Tensor:
        """See the base class."""
        triangles, terms = self.weights
        size = _side(triangles.shape[1])
        skew = torch.zeros(len(triangles), size, size, device=device)
        rows, columns = torch.triu_indices(size, size, 1, device=device)
        skew[:, rows, columns] = triangles.to(device, torch.float32)
        skew = skew - skew.transpose(1, 2)
        turns = _series(skew, terms) if terms else _cayley(skew)
        if len(turns) == 1 and inputs % size == 0:
            turns = turns.expand(inputs // size, -1, -1)
        return turns.unsqueeze(0)


class InputBOFTAdapter(_InputRotation):
    """weights = (blocks [stages, k, b, b], scale [out, 1] of the outputs or None)."""

    name = "boft_of_inputs"

    @classmethod
    def load(
        cls,
        x: str,
        lora: Mapping[str, torch.Tensor],
        alpha: float | None,  # noqa: ARG003
        dora_scale: torch.Tensor | None,  # noqa: ARG003
        loaded_keys: set[str] | None = None,
    ) -> InputBOFTAdapter | None:
        """See the base class."""
        blocks = lora.get(f"{x}.boft_R")
        if blocks is None or blocks.ndim != 4:
            return None
        used = set() if loaded_keys is None else loaded_keys
        return cls(used, tuple(take(lora, used, f"{x}.boft_R", f"{x}.boft_s")))

    def extent(self) -> tuple[int, int | None] | None:
        """See the base class."""
        blocks, scale = self.weights
        inputs = blocks.shape[1] * blocks.shape[2]
        return None if scale is None else (scale.numel(), scale.numel() * inputs)

    def blocks(self, inputs: int, device: torch.device) -> torch.Tensor:  # noqa: ARG002
        """See the base class."""
        learned = self.weights[0].to(device, torch.float32)
        return _cayley((learned - learned.transpose(-1, -2)) / 2)

    def scaled(self, rotated: torch.Tensor, key: str, function: DeltaFunction) -> torch.Tensor:
        """See the base class; the scales are in the row order of the file."""
        scale = moved(self.weights[1], rotated.device, rotated.dtype)
        if scale is None:
            return rotated
        if scale.numel() != rotated.shape[0]:
            raise AdapterError(f"'{key}': {scale.numel()} scales for {rotated.shape[0]} outputs")
        return rotated * function(scale.reshape(-1, 1))


def _side(triangle: int) -> int:
    """Rows of a matrix whose upper triangle has so many numbers."""
    return (1 + math.isqrt(1 + 8 * triangle)) // 2


def _cayley(skew: torch.Tensor) -> torch.Tensor:
    identity = torch.eye(skew.shape[-1], device=skew.device)
    return torch.linalg.solve(identity + skew, identity - skew, left=False)


def _series(skew: torch.Tensor, terms: int) -> torch.Tensor:
    """I + 2 Q + 2 Q^2 + ... with the last of the powers taken once, as the library has it: never
    the second, so that three terms are four."""
    total = torch.eye(skew.shape[-1], device=skew.device).expand_as(skew)
    if terms > 1:
        total = total + 2 * skew
    if terms > 2:
        power = skew
        for _ in range(2, max(terms, 4) - 1):
            power = power @ skew
            total = total + 2 * power
        total = total + power @ skew
    return total


def _rotate(weight: torch.Tensor, turn: torch.Tensor, stage: int | None) -> torch.Tensor:
    """Columns of a weight [out, k b], rotated in groups by turn [k, b, b].

    Args:
        stage: Of the butterfly, which takes its groups from columns ever further apart; None where
            there is but one.
    """
    count, size, _ = turn.shape
    order = None if stage is None else _butterfly(count * size, count >> stage, size // 2)
    columns = weight if order is None else weight[:, torch.argsort(order)]
    groups = columns.reshape(len(weight), count, size)
    rotated = torch.einsum("k i j, r k j -> r k i", turn, groups).reshape(weight.shape)
    return rotated if order is None else rotated[:, order]


def _butterfly(total: int, groups: int, step: int) -> torch.Tensor:
    """Order that, within each of `groups`, puts even runs of `step` numbers before odd ones."""
    runs = torch.arange(total).reshape(groups, -1, step)
    return torch.cat([runs[:, 0::2], runs[:, 1::2]], dim=1).flatten()
