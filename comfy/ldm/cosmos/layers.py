"""What the layers of both generations of Cosmos are made of: turns by place, embeddings of cells
and times, modulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

THETA = 10000.0


def frequencies(channels: int, stretch: float, device: Any) -> Tensor:
    """Angle per position along one axis, for each pair of channels.

    ``stretch`` spreads the training's positions over a longer axis.

    Source: the base grows by stretch^(channels / (channels - 2)), https://arxiv.org/abs/2309.00071.
    """
    theta = THETA * stretch ** (channels / (channels - 2)) if channels > 2 else THETA
    places = torch.arange(0, channels, 2, device=device, dtype=torch.float32)
    return 1.0 / theta ** (places / channels)


def position_angles(
    sizes: Sequence[int], head: int, stretches: Sequence[float], device: Any, pace: float = 1.0
) -> Tensor:
    """Angles ``[T * H * W, head / 2]``: a third of the channels for rows, for columns, the rest for
    frames.

    Args:
        sizes: Frames, rows and columns.
        stretches: As `frequencies` has it, of each.
        pace: Time from a frame to the next, in that of the training.
    """
    side = head // 6 * 2
    parts = []
    for axis, (channels, stretch) in enumerate(zip((head - 2 * side, side, side), stretches)):
        places = torch.arange(sizes[axis], device=device, dtype=torch.float32)
        if axis == 0:
            places = places * pace
        angles = torch.outer(places, frequencies(channels, stretch, device))
        shape = [1, 1, 1, angles.shape[-1]]
        shape[axis] = sizes[axis]
        parts.append(angles.view(shape).expand(*sizes, -1))
    return torch.cat(parts, dim=-1).flatten(0, 2)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Turn ``x [B, heads, L, D]``; its first and second half of channels are the pairs."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat(turned, dim=-1).to(x.dtype)


class GPT2FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.layer1 = operations.Linear(width, inner, bias=False, **place)
        self.layer2 = operations.Linear(inner, width, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(functional.gelu(self.layer1(x)))


def modulation(
    width: int, inner: int | None, parts: int, operations: Any, **place: Any
) -> nn.Sequential:
    """From a time to changes of a layer, with fewer channels between if there is a number."""
    if inner is None:
        linear = operations.Linear(width, parts * width, bias=False, **place)
        return nn.Sequential(nn.SiLU(), linear)
    return nn.Sequential(
        nn.SiLU(),
        operations.Linear(width, inner, bias=False, **place),
        operations.Linear(inner, parts * width, bias=False, **place),
    )


class PatchEmbed(nn.Module):
    """Cells of a video as tokens."""

    def __init__(self, channels: int, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        linear = operations.Linear(channels, width, bias=False, **place)
        self.proj = nn.Sequential(nn.Identity(), linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)


class TimestepEmbedding(nn.Module):
    """Waves of a time to what is added to the changes of each layer."""

    def __init__(self, width: int, has_lora: bool, operations: Any, **place: Any) -> None:
        super().__init__()
        out = 3 * width if has_lora else width
        self.linear_1 = operations.Linear(width, width, bias=not has_lora, **place)
        self.linear_2 = operations.Linear(width, out, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(functional.silu(self.linear_1(x)))


def mask_like(x: Tensor, mask: Tensor | None) -> Tensor:
    """A mask of padding as a channel of a video ``[B, 1, T, H, W]``."""
    if mask is None:
        return torch.zeros_like(x[:, :1])
    mask = functional.interpolate(mask.to(x), x.shape[-2:], mode="nearest")
    return mask[:, :, None].expand(x.shape[0], 1, x.shape[2], *mask.shape[-2:])
