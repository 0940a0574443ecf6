"""Taking numbers of a few bits out of bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of every block, as float32 ``[n, 1]``; blocks are ``[n, bytes]``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(data: Tensor) -> Tensor:
    """Both halves of bytes ``[..., m]``, all lower ones before all upper ones ``[..., 2, m]``."""
    return torch.stack((data & 15, data >> 4), dim=-2)


def paired_nibbles(data: Tensor) -> Tensor:
    """Both halves of bytes ``[..., m]``, the upper one of each before its lower ``[..., 2 m]``."""
    return torch.stack((data >> 4, data & 15), dim=-1).flatten(-2)


def shifted(data: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """Bits of bytes ``[..., m]`` from each of some places on ``[..., shifts, m]``."""
    return torch.stack([(data >> shift) & mask for shift in shifts], dim=-2)


def bits_in_order(data: Tensor) -> Tensor:
    """The bits of bytes ``[n, m]``, lowest first ``[n, 8 m]``, each 0 or 1."""
    return torch.stack([(data >> bit) & 1 for bit in range(8)], dim=-1).flatten(1)


@functools.lru_cache(maxsize=64)
def table(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A table of numbers on a device, made once."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


def looked_up(codes: Tensor, values: tuple[float, ...]) -> Tensor:
    """The numbers that codes stand for."""
    chosen = codes.flatten().int()  # `index_select` takes a quarter of the time that brackets take
    return table(values, codes.device).index_select(0, chosen).reshape(codes.shape)


def power_of_two(exponents: Tensor, bias: int) -> Tensor:
    """2 to the power of (byte - bias), exactly, down to the smallest float32 that is not 0.

    Args:
        bias: 127, or 128 for halved values.
    """
    wide = exponents.to(torch.int32) - (bias - 127)
    normal = (wide << 23).view(torch.float32)
    small = torch.full_like(wide, 1 << 22) >> (-wide).clamp(min=0, max=31)  # below 2 ** -126
    return torch.where(wide > 0, normal, small.view(torch.float32))
