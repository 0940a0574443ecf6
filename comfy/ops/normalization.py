"""Group norms on a CPU with sums that do not depend on the batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling as compiling
from torch.nn import functional as F

from comfy.devices import precision

MANY = 1024
"""Positions from which torch divides a whole batch, channels innermost, among the threads."""


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Norm of ``x [B, C, ...]`` over groups of channels; an item's sums are its own.

    Where threads would share out the positions of all items, where one thread's sum ends and the
    next begins would depend on the batch. There items are normalised one by one.
    """
    if _is_shared_out(x):
        return torch.cat([F.group_norm(item, groups, weight, bias, eps) for item in x.split(1)])
    return F.group_norm(x, groups, weight, bias, eps)


def _is_shared_out(x: Tensor) -> bool:
    return (
        x.ndim == 4
        and x.shape[0] > 1
        and x.device.type == "cpu"
        and x.shape[2] * x.shape[3] >= MANY
        and torch.get_num_threads() > 1
        and x.is_contiguous(memory_format=torch.channels_last)
        and not compiling()
        and precision.tunes_cpu()
    )


class ItemwiseGroupNorm(nn.GroupNorm):
    """Torch's layer, computed by `group_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        return group_norm(input, self.num_groups, self.weight, self.bias, self.eps)
