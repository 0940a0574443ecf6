"""The one code of weights of few bits: blocks of bytes, each some numbers, perhaps with a scale.

A format is a row in a table (`GGML_TYPES` here, `ENCODINGS` in `comfy.weights.encodings`): how many
numbers a block has, how many bytes, and what unpacks it. Everything else is the same for all:
a weight is decoded some blocks at a time, so that what decoding takes beside the result is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling as compiling

from comfy.devices import casting
from comfy.ops.encoded import PLAIN_TYPE, PLAIN_TYPES, Parts

CPU_NUMBERS = 1 << 18
"""Numbers decoded at once on the CPU: what is made on the way stays in its cache."""

DEVICE_NUMBERS = 1 << 22
"""The same elsewhere, where each operation has a cost of its own."""


@dataclass(frozen=True)
class BlockCode:
    """How one weight is stored. See `comfy.ops.encoded.Encoding`.

    Attributes:
        name: Of the format.
        shape: Of the weight.
        elements: Numbers of a block.
        size: Bytes of a block.
        unpack: Blocks ``[n, size]`` -> numbers ``[n, elements]`` in float32.
        scales: The layer's other tensors and the weight's shape -> a factor for each block in
            float32; None where blocks hold their own.
    """

    name: str
    shape: torch.Size
    elements: int
    size: int
    unpack: Callable[[Tensor], Tensor]
    scales: Callable[[Parts, torch.Size], Tensor] | None = None
    multiplies_in_float8: ClassVar[bool] = False
    rewrites: ClassVar[bool] = False

    def decode(self, stored: Tensor, parts: Parts, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`."""
        if stored.dtype in PLAIN_TYPES:
            return casting.cast_to(stored, dtype)
        blocks = stored.detach().view(torch.uint8).reshape(-1, self.size)
        scales = None if self.scales is None else self.scales(parts, self.shape).reshape(-1, 1)
        step = len(blocks) if compiling() else self._blocks_at_once(stored.device)
        # Compiled code keeps nothing in between, and would unroll the loop below.
        if step >= len(blocks):
            numbers = self.unpack(blocks)
            whole = numbers if scales is None else numbers.mul_(scales)
            return whole.to(dtype).reshape(self.shape)
        decoded = torch.empty((len(blocks), self.elements), dtype=dtype, device=stored.device)
        for start in range(0, len(blocks), step):
            chosen = slice(start, start + step)
            numbers = self.unpack(blocks[chosen])
            decoded[chosen] = numbers if scales is None else numbers.mul_(scales[chosen])
        return decoded.reshape(self.shape)

    def _blocks_at_once(self, device: torch.device) -> int:
        numbers = CPU_NUMBERS if device.type == "cpu" else DEVICE_NUMBERS
        return max(1, numbers // max(self.elements, 1))

    def encode(self, weight: Tensor, parts: Parts, seed: int | None) -> Tensor:  # noqa: ARG002
        """A patched weight as it rests: a plain one, for in few bits most of the change is lost."""
        limit = torch.finfo(PLAIN_TYPE).max
        return weight.clamp(-limit, limit).to(PLAIN_TYPE)

    @property
    def has_whole_rows(self) -> bool:
        """Whether rows of the weight are rows of bytes, so that some can be taken undecoded."""
        row = math.prod(self.shape[1:])
        return self.scales is None and len(self.shape) > 1 and row > 0 and row % self.elements == 0

    def rows(self, count: int) -> BlockCode:
        """The code of some of the weight's rows."""
        return replace(self, shape=torch.Size((count, *self.shape[1:])))

    def decode_rows(
        self,
        stored: Tensor,
        parts: Parts,  # noqa: ARG002 - blocks that have whole rows hold their scales
        chosen: Tensor,
        dtype: torch.dtype,
    ) -> Tensor | None:
        """Some rows of a table; None where they are not whole."""
        if stored.dtype in PLAIN_TYPES or not self.has_whole_rows:
            return None
        taken = stored.detach().reshape(self.shape[0], -1)[chosen]
        return self.rows(len(chosen)).decode(taken, {}, dtype)
