"""Whether anybody but its place holds a tensor, or looks at its memory.

Counted references are compared with those of a tensor that is known to be held once, so that no
number depends on how an interpreter or torch counts its own.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def is_held_once(table: Mapping[str, Any], name: str) -> bool:
    """Whether a parameter is referred to by its table alone, and its memory by no other tensor.

    The caller must not hold the parameter either. False where that cannot be told.
    """
    try:
        return not table[name].is_shared() and _holders(table, name) == _holders_of_one()
    except AttributeError:  # a torch that does not tell
        return False


def owns_memory(weight: torch.Tensor) -> bool:
    """Whether no other tensor, array or storage looks at a tensor's memory."""
    return _memory_holders(weight) == _holders_of_one()[2:]


@functools.cache
def _holders_of_one() -> tuple[int, ...]:
    return _holders({"x": nn.Parameter(torch.empty(1), requires_grad=False)}, "x")


def _holders(table: Mapping[str, Any], name: str) -> tuple[int, ...]:
    return (sys.getrefcount(table[name]), table[name]._use_count(), *_memory_holders(table[name]))


def _memory_holders(weight: torch.Tensor) -> tuple[int, int]:
    storage = weight.untyped_storage()
    uses: int = torch._C._storage_Use_Count(storage._cdata)
    return sys.getrefcount(storage), uses
