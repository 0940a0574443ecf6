"""The types of numbers in GGUF files: one table.

Types that are missing here (IQ1, IQ2 and IQ3, which need large tables, and those that only live in
the memory of a running program) are named in an error.
Source: https://github.com/ggml-org/ggml, docs/gguf.md and ggml.h.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from comfy.weights.low_bit import ggml_simple as simple
from comfy.weights.low_bit import ggml_super as super_blocks


@dataclass(frozen=True)
class GgmlType:
    """How numbers are stored.

    Attributes:
        name: As people call it.
        elements: Numbers of a block.
        size: Bytes of a block.
        unpack: Blocks ``[n, size]`` -> numbers ``[n, elements]`` in float32; None for plain types.
        dtype: Of plain types.
    """

    name: str
    elements: int
    size: int
    unpack: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype | None = None


def _plain(name: str, dtype: torch.dtype) -> GgmlType:
    return GgmlType(name, 1, dtype.itemsize, dtype=dtype)


GGML_TYPES: dict[int, GgmlType] = {
    0: _plain("F32", torch.float32),
    1: _plain("F16", torch.float16),
    2: GgmlType("Q4_0", 32, 18, simple.q4_0),
    3: GgmlType("Q4_1", 32, 20, simple.q4_1),
    6: GgmlType("Q5_0", 32, 22, simple.q5_0),
    7: GgmlType("Q5_1", 32, 24, simple.q5_1),
    8: GgmlType("Q8_0", 32, 34, simple.q8_0),
    10: GgmlType("Q2_K", 256, 84, super_blocks.q2_k),
    11: GgmlType("Q3_K", 256, 110, super_blocks.q3_k),
    12: GgmlType("Q4_K", 256, 144, super_blocks.q4_k),
    13: GgmlType("Q5_K", 256, 176, super_blocks.q5_k),
    14: GgmlType("Q6_K", 256, 210, super_blocks.q6_k),
    20: GgmlType("IQ4_NL", 32, 18, simple.iq4_nl),
    23: GgmlType("IQ4_XS", 256, 136, super_blocks.iq4_xs),
    24: _plain("I8", torch.int8),
    25: _plain("I16", torch.int16),
    26: _plain("I32", torch.int32),
    27: _plain("I64", torch.int64),
    28: _plain("F64", torch.float64),
    30: _plain("BF16", torch.bfloat16),
    34: GgmlType("TQ1_0", 256, 54, super_blocks.tq1_0),
    35: GgmlType("TQ2_0", 256, 66, super_blocks.tq2_0),
    39: GgmlType("MXFP4", 32, 17, simple.mxfp4),
}

NAMES_OF_OTHERS: dict[int, str] = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M",
}  # fmt: skip
"""Types that are known by name only: files of diffusion models do not have them."""


def known_names() -> str:
    """The types that can be read, for messages."""
    return ", ".join(kind.name for kind in GGML_TYPES.values())
