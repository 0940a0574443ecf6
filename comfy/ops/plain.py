"""Linear layers whose weight may be used in parts, because calling them would do nothing else.

Whoever computes with a layer's weight instead of calling the layer must know that a call would have
given the same: no cast or streaming, no hook, no replaced forward, no subclass with its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comfy.ops.layers import disable_weight_init, manual_cast

PLAIN_CLASSES = (torch.nn.Linear, disable_weight_init.Linear, manual_cast.Linear)
PLAIN_TENSORS = (torch.nn.Parameter, Tensor)


def is_plain_linear(layer: Any) -> bool:
    """Whether calling a layer is nothing but ``x W^T + b`` with its own parameters."""
    return (
        type(layer) in PLAIN_CLASSES
        and "forward" not in vars(layer)
        and not (layer._forward_hooks or layer._forward_pre_hooks)
        and not (hasattr(layer, "needs_cast") and layer.needs_cast())
        and type(layer.weight) in PLAIN_TENSORS
    )


def linear_parts(layer: Any, x: Tensor, parts: int) -> list[Tensor]:
    """The layer's result for ``x [..., D]`` in equal parts of its last axis, each contiguous."""
    weights = layer.weight.chunk(parts)
    biases = [None] * parts if layer.bias is None else layer.bias.chunk(parts)
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, biases)]
