"""Rows that pictures add to states of a language model's first layers.

Source: https://arxiv.org/abs/2406.04334.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeepRows:
    """What is added to states of some tokens behind the first layers.

    Attributes:
        start: The first of the tokens.
        rows: ``[n, D]`` for each of the layers.
    """

    start: int
    rows: Sequence[Tensor]


def with_deep(x: Tensor, layer: int, deep: Sequence[DeepRows]) -> Tensor:
    """States ``[B, L, D]`` behind a layer with what is added to those of the first text."""
    for one in deep:
        if layer < len(one.rows):
            rows = one.rows[layer].to(x)
            x = x.clone()  # states of layers may be kept
            x[0, one.start : one.start + len(rows)] += rows
    return x
