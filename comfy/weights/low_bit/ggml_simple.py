"""Blocks of 32 numbers that share one scale, as GGUF files hold them.

Each function takes blocks ``[n, bytes]`` and gives their numbers ``[n, elements]`` in float32, in
the order of operations of the format's reference, so that all bits agree with it.
Source of the layouts: https://github.com/ggml-org/ggml, ggml-common.h.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comfy.weights.low_bit.bits import bits_in_order, half, looked_up, nibbles, power_of_two

# What the four bits of IQ4 stand for: finer near zero, where most weights are.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Twice the values of E2M1, the four-bit float.
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def q4_0(blocks: Tensor) -> Tensor:
    """Scale, 16 bytes: 4 bits around 8."""
    return half(blocks, 0) * (nibbles(blocks[:, 2:]).flatten(1).float() - 8)


def q4_1(blocks: Tensor) -> Tensor:
    """Scale, smallest value, 16 bytes: 4 bits."""
    return half(blocks, 0) * nibbles(blocks[:, 4:]).flatten(1).float() + half(blocks, 2)


def q5_0(blocks: Tensor) -> Tensor:
    """Scale, 32 fifth bits, 16 bytes: 5 bits around 16."""
    return half(blocks, 0) * (_five_bits(blocks[:, 2:6], blocks[:, 6:]).float() - 16)


def q5_1(blocks: Tensor) -> Tensor:
    """Scale, smallest value, 32 fifth bits, 16 bytes: 5 bits."""
    return half(blocks, 0) * _five_bits(blocks[:, 4:8], blocks[:, 8:]).float() + half(blocks, 2)


def _five_bits(fifth: Tensor, low: Tensor) -> Tensor:
    return nibbles(low).flatten(1) | (bits_in_order(fifth) << 4)


def q8_0(blocks: Tensor) -> Tensor:
    """Scale, 32 signed bytes."""
    return blocks[:, 2:].view(torch.int8).float() * half(blocks, 0)


def iq4_nl(blocks: Tensor) -> Tensor:
    """Scale, 16 bytes: numbers of a table."""
    return half(blocks, 0) * looked_up(nibbles(blocks[:, 2:]).flatten(1), IQ4_VALUES)


def mxfp4(blocks: Tensor) -> Tensor:
    """Exponent of the scale, 16 bytes: four-bit floats."""
    scale = power_of_two(blocks[:, :1], 128)
    return scale * looked_up(nibbles(blocks[:, 1:]).flatten(1), E2M1_DOUBLED)
