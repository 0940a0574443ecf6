"""Blocks of 256 numbers whose parts have scales that are stored in few bits themselves.

Functions as in `ggml_simple`. Source of the layouts: https://github.com/ggml-org/ggml,
ggml-common.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comfy.weights.low_bit.bits import (
    half,
    looked_up,
    nibbles,
    shifted,
)
from comfy.weights.low_bit.ggml_simple import IQ4_VALUES

PAIRS = (0, 2, 4, 6)  # where the four pairs of bits of a byte begin


def q2_k(blocks: Tensor) -> Tensor:
    """16 scales and smallest values in 4 bits each, 64 bytes of 2 bits, scale of either."""
    count = len(blocks)
    scales = blocks[:, :16]
    step = half(blocks, 80) * (scales & 15).float()
    least = half(blocks, 82) * (scales >> 4).float()
    numbers = shifted(blocks[:, 16:80].reshape(count, 2, 32), PAIRS, 3).reshape(count, 16, 16)
    return (step[..., None] * numbers.float() - least[..., None]).flatten(1)


def q3_k(blocks: Tensor) -> Tensor:
    """256 third bits (0: minus 4), 64 bytes of 2 bits, 16 scales of 6 bits around 32, scale."""
    count = len(blocks)
    packed = blocks[:, 96:108]
    low = nibbles(packed[:, :8]).flatten(1)
    high = shifted(packed[:, 8:], PAIRS, 3).flatten(1)
    scales = (low | (high << 4)).to(torch.int8) - 32
    step = half(blocks, 108) * scales.float()
    third = shifted(blocks[:, :32], range(8), 1).reshape(count, 16, 16)
    pairs = shifted(blocks[:, 32:96].reshape(count, 2, 32), PAIRS, 3).reshape(count, 16, 16)
    numbers = pairs.to(torch.int8) - ((third ^ 1) << 2).to(torch.int8)
    return (step[..., None] * numbers.float()).flatten(1)


def q4_k(blocks: Tensor) -> Tensor:
    """Scale of scales and of smallest values, 8 of each in 6 bits, 128 bytes of 4 bits."""
    count = len(blocks)
    step, least = _steps(blocks)
    numbers = nibbles(blocks[:, 16:].reshape(count, 4, 32)).reshape(count, 8, 32)
    return (step[..., None] * numbers.float() - least[..., None]).flatten(1)


def q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with 256 fifth bits before the bytes of 4."""
    count = len(blocks)
    step, least = _steps(blocks)
    low = nibbles(blocks[:, 48:].reshape(count, 4, 32)).reshape(count, 8, 32)
    fifth = shifted(blocks[:, 16:48], range(8), 1)
    numbers = low | (fifth << 4)
    return (step[..., None] * numbers.float() - least[..., None]).flatten(1)


def _steps(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and smallest values ``[n, 8]`` of the eight parts of Q4_K and Q5_K."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | ((first >> 2) & 48)], dim=1)
    least = torch.cat([second & 63, (third >> 4) | ((second >> 2) & 48)], dim=1)
    return half(blocks, 0) * scales.float(), half(blocks, 2) * least.float()


def q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of 4 bits, 64 bytes of 2 upper bits, 16 signed scales, scale; 6 bits around 32."""
    count = len(blocks)
    step = half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    low = nibbles(blocks[:, :128].reshape(count, 2, 64)).reshape(count, 2, 4, 32)
    high = shifted(blocks[:, 128:192].reshape(count, 2, 32), PAIRS, 3)
    numbers = (low | (high << 4)).to(torch.int8) - 32
    return (step[..., None] * numbers.reshape(count, 16, 16).float()).flatten(1)


def iq4_xs(blocks: Tensor) -> Tensor:
    """Scale, upper 2 and lower 4 bits of 8 scales around 32, 128 bytes: numbers of a table."""
    count = len(blocks)
    upper = shifted(blocks[:, 2:4, None], PAIRS, 3).flatten(1)
    lower = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    step = half(blocks, 0) * ((lower | (upper << 4)).to(torch.int8) - 32).float()
    codes = nibbles(blocks[:, 8:].reshape(count, 8, 16)).reshape(count, 8, 32)
    return (step[..., None] * looked_up(codes, IQ4_VALUES)).flatten(1)


def tq1_0(blocks: Tensor) -> Tensor:
    """48 bytes of 5 numbers of three values, 4 bytes of 4, scale."""
    thirds = (1, 3, 9, 27, 81)
    count = len(blocks)
    parts = [
        torch.stack([part * power for power in thirds[:powers]], dim=1).flatten(1)
        for part, powers in ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    ]
    numbers = (torch.cat(parts, dim=1).to(torch.int32) * 3) >> 8
    return half(blocks, 52) * (numbers.float() - 1).reshape(count, 256)


def tq2_0(blocks: Tensor) -> Tensor:
    """64 bytes of 4 numbers of three values in 2 bits, scale."""
    numbers = shifted(blocks[:, :64].reshape(len(blocks), 2, 32), PAIRS, 3)
    return half(blocks, 64) * (numbers.flatten(1).float() - 1)
