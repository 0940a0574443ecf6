"""Weights that stay off the device and travel to it at use.

`fetch` brings a layer's weight and bias to a device. When the layer belongs to a `StreamPlan`
(a model whose non-resident layers are known), the plan learns the order of use in the first pass
and from then on starts the next layer's copies on a copy stream while the present one computes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from comfy.devices import casting


class StreamSlot(NamedTuple):
    """A layer's place in a transfer plan."""

    plan: Any
    layer: Any


def fetch(
    layer: Any, device: torch.device | None
) -> tuple[torch.Tensor | None, torch.Tensor | None, Any]:
    """A layer's weight and bias on `device`, in their stored types.

    Args:
        layer: Anything with `weight` and `bias`.
        device: Where they are needed; None leaves them where they are.
    Returns:
        (weight, bias, token); hand the token to `release` after use.
    """
    weight, bias = layer.weight, layer.bias
    if device is None:
        return weight, bias, None
    away = (weight is not None and weight.device != device) or (
        bias is not None and bias.device != device
    )
    if not away:
        return weight, bias, None
    non_blocking = casting.device_supports_non_blocking(device)
    moved = [
        t if t is None else casting.cast_to(t, device=device, non_blocking=non_blocking)
        for t in (weight, bias)
    ]
    return moved[0], moved[1], None


def release(token: Any, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    """End the use of fetched tensors."""
    del token, weight, bias
