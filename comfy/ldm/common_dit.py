"""What transformers over patches share: padding to whole patches, a norm, turned pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def pad_to_patch_size(
    img: Tensor, patch_size: Sequence[int] = (2, 2), padding_mode: str = "circular"
) -> Tensor:
    """Pad the last axes of ``img [B, C, (T,) H, W]`` at their ends to multiples of the patch
    size."""
    jit: Any = torch.jit  # exports neither of the two names, though it documents both
    if padding_mode == "circular" and (jit.is_tracing() or jit.is_scripting()):
        padding_mode = "reflect"  # circular padding cannot be exported
    pad: list[int] = []
    for size, patch in zip(img.shape[-len(patch_size) :], patch_size):
        pad = [0, -size % patch, *pad]
    return F.pad(img, pad, mode=padding_mode) if any(pad) else img


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the pairs of neighbouring channels of ``x [..., D]`` by angles ``[..., D / 2]``."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    turned = [even * cos - odd * sin, odd * cos + even * sin]
    return torch.stack(turned, dim=-1).flatten(-2).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """``x / rms(x) * weight`` over the last axis."""
    if weight is not None and weight.dtype != x.dtype:
        weight = weight.to(x)
    return F.rms_norm(x, x.shape[-1:], weight=weight, eps=eps)


class RMSNorm(nn.Module):
    """`rms_norm` with a weight."""

    def __init__(self, dim: int, eps: float = 1e-6, dtype: Any = None, device: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x), self.eps)
