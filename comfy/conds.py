"""Network inputs made from one conditioning entry, and how several entries share a model call.

A base model's `extra_conds` returns them by argument name. Before each call they are fitted to the
batch (`process_cond`); entries whose inputs all agree (`can_concat`) are joined (`concat`).
"""
# ruff: noqa: ARG002

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comfy import resize

# Contexts of different length are repeated to a common multiple; past this many repeats a second
# model call is cheaper than the longer one.
MAX_CONTEXT_REPEATS = 4


def is_equal(x: Any, y: Any) -> bool:
    """Compare values that may be tensors or nested lists of them."""
    if torch.is_tensor(x) and torch.is_tensor(y):
        return x.shape == y.shape and torch.equal(x, y)
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(is_equal(x[key], y[key]) for key in x)
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        same_kind = type(x) is type(y) and len(x) == len(y)
        return same_kind and all(is_equal(a, b) for a, b in zip(x, y))
    return bool(x == y)


def _fitted(tensor: Tensor, batch_size: int, facts: dict[str, Any]) -> Tensor:
    """A tensor repeated to a batch, on the latent's device: packs join it with what is there."""
    return resize.repeat_to_batch_size(tensor.to(facts.get("device")), batch_size)


class CONDRegular:
    """A tensor [B, ...] that is repeated to the batch; equal shapes can share a call."""

    def __init__(self, cond: Any) -> None:
        self.cond = cond

    def _copy_with(self, cond: Any) -> CONDRegular:
        return self.__class__(cond)

    def process_cond(self, batch_size: int, **kwargs: Any) -> CONDRegular:
        """Fit to a batch; in kwargs `device` is the latent's, and `area` the cut the entry applies
        to, or None.
        """
        return self._copy_with(_fitted(self.cond, batch_size, kwargs))

    def can_concat(self, other: Any) -> bool:
        return self.cond.shape == other.cond.shape and self.cond.device == other.cond.device

    def concat(self, others: Sequence[Any]) -> Any:
        """The argument for one call on behalf of this entry and the others, in that order."""
        return torch.cat([self.cond, *(other.cond for other in others)])

    def size(self) -> list[int]:
        """Shape, for memory estimates."""
        return list(self.cond.size())


class CONDFrames(CONDRegular):
    """A tensor with parts for each frame of the latent, along which windows over a video cut it.

    Args:
        frame_axis: The axis of the frames.
        parts: Parts of a frame, one after another along it.
    """

    def __init__(self, cond: Any, frame_axis: int = 1, parts: int = 1) -> None:
        super().__init__(cond)
        self.frame_axis, self.parts = frame_axis, parts

    def _copy_with(self, cond: Any) -> CONDFrames:
        return self.__class__(cond, self.frame_axis, self.parts)


class CONDWhole(CONDRegular):
    """A tensor that windows over a video leave whole, though it may have as many frames."""


class CONDCells(CONDRegular):
    """A tensor whose last axes are those of the latent's cells, cut to the entry's area."""

    def process_cond(self, batch_size: int, area: Any = None, **kwargs: Any) -> CONDRegular:
        data = self.cond
        if area is not None:
            axes = len(area) // 2
            for axis in range(axes):
                data = data.narrow(axis - axes, area[axis + axes], area[axis])
        return self._copy_with(_fitted(data, batch_size, kwargs))


class CONDNoiseShape(CONDCells):
    """A tensor with the latent's axes [B, C, ...], cut to the entry's area."""


class CONDCrossAttn(CONDRegular):
    """Context tokens [B, L, D]; different lengths are repeated to a common multiple."""

    def can_concat(self, other: Any) -> bool:
        mine, theirs = self.cond.shape, other.cond.shape
        if mine != theirs:
            if mine[0] != theirs[0] or mine[2] != theirs[2]:
                return False
            common = math.lcm(mine[1], theirs[1])
            if common // min(mine[1], theirs[1]) > MAX_CONTEXT_REPEATS:
                return False
        return self.cond.device == other.cond.device

    def concat(self, others: Sequence[Any]) -> Tensor:
        contexts = [self.cond, *(other.cond for other in others)]
        length = math.lcm(*(context.shape[1] for context in contexts))
        # Softmax attention over the same tokens repeated gives the same result.
        return torch.cat(
            [c if c.shape[1] == length else c.repeat(1, length // c.shape[1], 1) for c in contexts]
        )


class CONDConstant(CONDRegular):
    """Any value that applies to the whole call; only equal values can share one."""

    def process_cond(self, batch_size: int, **kwargs: Any) -> CONDRegular:
        return self._copy_with(self.cond)

    def can_concat(self, other: Any) -> bool:
        return is_equal(self.cond, other.cond)

    def concat(self, others: Sequence[Any]) -> Any:
        return self.cond

    def size(self) -> list[int]:
        return [1]


class CONDList(CONDRegular):
    """A list of tensors [B, ...]; lists of equal shapes can share a call."""

    def process_cond(self, batch_size: int, **kwargs: Any) -> CONDRegular:
        return self._copy_with([_fitted(item, batch_size, kwargs) for item in self.cond])

    def can_concat(self, other: Any) -> bool:
        if len(self.cond) != len(other.cond):
            return False
        return all(mine.shape == theirs.shape for mine, theirs in zip(self.cond, other.cond))

    def concat(self, others: Sequence[Any]) -> list[Tensor]:
        return [torch.cat(items) for items in zip(self.cond, *(other.cond for other in others))]

    def size(self) -> list[int]:
        """Shape of one tensor as large as all together."""
        elements = sum(math.prod(item.size()[1:]) for item in self.cond)
        last = self.cond[0].size()[1] if self.cond and self.cond[0].ndim > 1 else 1
        return [1, last, elements // max(last, 1)]
