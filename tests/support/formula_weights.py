"""Weights by a formula, the same with every version of every library, for recorded answers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def fill_by_formula(state_dict: Mapping[str, Tensor]) -> None:
    """Overwrite tensors: matrices by waves of the size that keeps signals alike, norms near 1,
    biases near 0.

    Names decide the phase, so that no two tensors are alike.
    """
    for name, tensor in state_dict.items():
        phase = sum(map(ord, name)) % 97
        count = torch.arange(tensor.numel(), dtype=torch.float64)
        waves = torch.sin(count * 12.9898 + phase) * 43758.5453
        values = (waves - waves.floor()) * 2 - 1  # spread evenly over -1..1
        if tensor.ndim > 1:
            values = values * (3.0 / tensor[0].numel()) ** 0.5
        elif "norm" in name or "ln_" in name:
            values = 1 + 0.1 * values
        else:
            values = 0.1 * values
        tensor.copy_(values.reshape(tensor.shape))
