"""Feed-forwards of which each token takes a few: which, how much each counts, and their sum.

Source: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class MoEGate(nn.Module):
    """Which experts a token goes to, and how much each counts."""

    def __init__(self, width: int, experts: int, chosen: int, **place: Any) -> None:
        super().__init__()
        self.chosen = chosen
        self.weight = nn.Parameter(torch.empty(experts, width, **place))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts ``[N, chosen]`` of tokens ``[N, D]``.

        The weights are shares among all experts, so those of the chosen add up to less than 1.
        """
        scores = functional.linear(x, self.weight.to(x)).softmax(dim=-1)
        weights, numbers = scores.topk(self.chosen, dim=-1, sorted=False)
        return weights, numbers


def mixed(x: Tensor, gate: MoEGate, experts: Iterable[nn.Module]) -> Tensor:
    """Weighted sum of what the chosen experts make of each of the tokens ``[..., D]``."""
    tokens = x.flatten(0, -2)
    weights, numbers = gate(tokens)
    made = torch.zeros_like(tokens)
    for number, expert in enumerate(experts):
        rows, places = (numbers == number).nonzero(as_tuple=True)
        if rows.numel():
            share = weights[rows, places, None]
            made.index_add_(0, rows, expert(tokens[rows]) * share.to(tokens))
    return made.view_as(x)
