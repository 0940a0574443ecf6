"""Plain LoRAs added on the CPU as products into the weight's own rows.

A rank of 32 makes the product cheap and the memory traffic dear, so it is added where the weight
lies, in one pass. A float16 weight widened to float32, added to and narrowed again as a whole would
cross the memory bus six times: a few rows at a time, the wide form stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from comfy.weights.adapters.base import AdapterError
from comfy.weights.adapters.lora import LoRAAdapter
from comfy.weights.pages import WeightMemory, is_channels_last

BLOCK_ELEMENTS = 2**19
"""Elements of a block that is converted: 2 MiB of float32, what the caches of two cores hold."""

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
    terms = terms_of(patches, weight, key)
    if terms is None:
        return None
    out = memory.empty_like(weight)  # keeps the layout
    rows, source = as_rows(out, weight), as_rows(weight, weight)
    if rows.dtype == torch.float32:
        rows.copy_(source)
        add(rows, terms, memory)
        return out
    for block, start in converted_blocks(source, torch.float32, memory):
        _add(block, terms, start)
        rows[start : start + len(block)].copy_(block)
    return out


def terms_of(patches: Sequence[Any], weight: torch.Tensor, key: str) -> list[Term] | None:
    """The patches of a weight as terms; None when they are not all plain LoRAs, or it is none
    that rows of a plain type and layout on the CPU make up."""
    if weight.device.type != "cpu" or weight.dtype not in TYPES or weight.ndim < 2:
        return None
    channels_last = not weight.is_contiguous()
    if channels_last and not is_channels_last(weight):
        return None
    terms = [_term(patch, weight, key, channels_last) for patch in patches]
    known = [term for term in terms if term is not None]
    return known if known and len(known) == len(terms) else None


def as_rows(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A tensor of a weight's shape with its axes in the order of that weight's memory.

    Of the weight itself, and of whatever else has its layout, each block of rows is contiguous.
    """
    return tensor.detach() if weight.is_contiguous() else tensor.detach().permute(0, 2, 3, 1)


def converted_blocks(
    rows: torch.Tensor, dtype: torch.dtype, memory: WeightMemory
) -> Iterator[tuple[torch.Tensor, int]]:
    """Copies of a few rows at a time in another type, and the number of the first of them.

    All lie in the same memory, which what is done to a block may change.
    """
    if not rows.numel():
        return
    blocks = -(-rows.numel() // BLOCK_ELEMENTS)
    step = max(1, -(-len(rows) // blocks))
    converted = memory.scratch((step, *rows.shape[1:]), dtype)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        block = converted[: len(part)]
        block.copy_(part)
        yield block, start


def _term(patch: Any, weight: torch.Tensor, key: str, channels_last: bool) -> Term | None:
    strength, adapter, strength_model, offset, function = patch
    if type(adapter) is not LoRAAdapter or function is not None:
        return None
    axis, start, length = offset or (0, 0, weight.shape[0])
    start += weight.shape[0] if start < 0 else 0
    outside = start < 0 or start + length > weight.shape[0]
    if axis != 0 or outside or not adapter.is_plain_product():
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


def add(rows: torch.Tensor, terms: Sequence[Term], memory: WeightMemory) -> None:
    """Add terms, in float32, to the rows of a weight of any type."""
    if rows.dtype == torch.float32:
        _add(rows, terms, 0)
        return
    for block, start in converted_blocks(rows, torch.float32, memory):
        _add(block, terms, start)
        rows[start : start + len(block)].copy_(block)


def _add(block: torch.Tensor, terms: Sequence[Term], start: int) -> None:
    """Add terms to a block of float32 rows of a weight, of which the first is number `start`."""
    for term in terms:
        first, last = max(start, term.start), min(start + len(block), term.stop)
        if first >= last:
            continue
        part = block[first - start : last - start].flatten(1)
        if term.strength_model != 1.0:
            part *= term.strength_model
        part.addmm_(term.up[first - term.start : last - term.start], term.down, alpha=term.alpha)
