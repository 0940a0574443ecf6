"""Plain LoRAs added on the CPU a few rows at a time.

A rank of 32 makes the product cheap and the memory traffic dear: a float16 weight widened to
float32, added to and narrowed again as a whole crosses the memory bus six times. In blocks of rows
the wide form stays in the processor's cache, and each weight is read once and written once, into
memory that a former LoRA's weight had if there was one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from comfy.weights.adapters.base import AdapterError
from comfy.weights.adapters.lora import LoRAAdapter
from comfy.weights.pages import WeightMemory, is_channels_last

BLOCK_ELEMENTS = 2**21
"""Elements of a block of a float32 weight: 8 MiB, what a third-level cache holds."""

WIDE_ELEMENTS = 2**19
"""Elements of a block that is widened to float32: 2 MiB, what the caches of two cores hold."""

TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Storage types that are rounded by a plain cast."""


class Term(NamedTuple):
    """One LoRA on rows start..stop of a weight: rows * strength_model + alpha * up @ down."""

    strength_model: float
    up: torch.Tensor
    down: torch.Tensor
    alpha: float
    start: int
    stop: int


def patched(
    patches: Sequence[Any], weight: torch.Tensor, key: str, memory: WeightMemory
) -> torch.Tensor | None:
    """The weight with its patches in its own type; None when they are not all plain LoRAs.

    The arithmetic is that of `arithmetic.calculate_weight` in float32.

    Args:
        patches: As for `calculate_weight`.
        weight: Not modified.
        key: For messages.
        memory: Where the result is put.
    """
    if weight.device.type != "cpu" or weight.dtype not in TYPES or weight.ndim < 2:
        return None
    channels_last = not weight.is_contiguous()
    if channels_last and not is_channels_last(weight):
        return None
    terms = [_term(patch, weight, key, channels_last) for patch in patches]
    known = [term for term in terms if term is not None]
    if not known or len(known) < len(terms):
        return None
    out = memory.empty_like(weight)  # keeps the layout
    _fill(_as_matrix(out), _as_matrix(weight), known)
    return out


def _as_matrix(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, columns] over the tensor's own memory."""
    dense = tensor if tensor.is_contiguous() else tensor.permute(0, 2, 3, 1)
    return dense.flatten(start_dim=1)


def _term(patch: Any, weight: torch.Tensor, key: str, channels_last: bool) -> Term | None:
    strength, adapter, strength_model, offset, function = patch
    if type(adapter) is not LoRAAdapter or function is not None:
        return None
    axis, start, length = offset or (0, 0, weight.shape[0])
    if axis != 0 or not adapter.is_plain_product():
        return None
    try:
        up, down, scale = adapter.factors(weight.device, torch.float32, key)
    except AdapterError:  # the general path says what is wrong
        return None
    if tuple(up.shape) != (length, down.shape[0]) or down[0].numel() != weight[0].numel():
        return None
    if channels_last:
        down = down.reshape(-1, *weight.shape[1:]).permute(0, 2, 3, 1)
    return Term(strength_model, up, down.flatten(1), strength * scale, start, start + length)


def _fill(out: torch.Tensor, weight: torch.Tensor, terms: Sequence[Term]) -> None:
    rows, columns = weight.shape
    plain = out.dtype == torch.float32
    blocks = max(1, -(-rows * columns // (BLOCK_ELEMENTS if plain else WIDE_ELEMENTS)))
    step = -(-rows // blocks)
    wide = None if plain else torch.empty(step, columns)
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        block = out[start:stop] if wide is None else wide[: stop - start]
        block.copy_(weight[start:stop])
        for term in terms:
            _add(block, term, start, stop)
        if wide is not None:
            out[start:stop].copy_(block)


def _add(block: torch.Tensor, term: Term, start: int, stop: int) -> None:
    """Add a term to rows start..stop of a weight, as far as it concerns them."""
    first, last = max(start, term.start), min(stop, term.stop)
    if first >= last:
        return
    part = block[first - start : last - start]
    if term.strength_model != 1.0:
        part *= term.strength_model
    part.addmm_(term.up[first - term.start : last - term.start], term.down, alpha=term.alpha)
