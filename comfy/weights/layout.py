"""Lays the weights of convolutions out as the device that runs them reads them fastest.

CPUs want channels innermost: with weights in the file's order every call reorders them first, which
costs 5 % of a full-size Stable Diffusion step and 20 % of a small one (measured on AVX-512).
"""

from __future__ import annotations

import torch
from torch import nn

from comfy.devices import precision
from comfy.weights.mapped_file import release_pages

CONVOLUTIONS = (nn.Conv2d,)


def wants_channels_last(device: torch.device | str) -> bool:
    """Whether convolutions on a device should have their channels innermost."""
    on_cpu = torch.device(device).type == "cpu"
    return precision.force_channels_last() or (on_cpu and precision.tunes_cpu())


def arrange_convolutions(module: nn.Module, device: torch.device | str) -> None:
    """Give all convolution weights of a network the layout its device wants, one at a time.

    Best before the network is filled: weights on the meta device only note the layout, and a file's
    are then brought into it as they are converted. Values and state-dict keys stay as they are;
    pages of a mapped file that were copied are given back.
    """
    if not wants_channels_last(device):
        return
    for layer in module.modules():
        weight = getattr(layer, "weight", None)
        if not isinstance(layer, CONVOLUTIONS) or weight is None:
            continue
        if weight.shape[2:].numel() == 1 or weight.is_contiguous(memory_format=torch.channels_last):
            continue  # a 1x1 kernel has one layout
        if weight.is_meta:
            arranged = torch.empty(
                weight.shape, dtype=weight.dtype, device="meta", memory_format=torch.channels_last
            )
        else:
            arranged = weight.detach().contiguous(memory_format=torch.channels_last)
            release_pages(weight.detach())
        layer.weight = nn.Parameter(arranged, requires_grad=False)
