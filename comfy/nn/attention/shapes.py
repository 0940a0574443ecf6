"""How tensors enter and leave an attention function, the same for every back end.

A network hands over ``[B, L, heads * D]`` and gets the same back; with ``skip_reshape`` it hands
over ``[B, heads, L, D]``, with ``skip_output_reshape`` it gets that.
"""

from __future__ import annotations

from torch import Tensor


def split_heads(x: Tensor, heads: int) -> Tensor:
    """View ``[B, L, heads * D]`` as ``[B, heads, L, D]`` without a copy."""
    batch, length, width = x.shape
    if width % heads:
        raise ValueError(f"attention width {width} is not divisible by {heads} heads")
    return x.view(batch, length, heads, width // heads).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Bring ``[B, heads, L, D]`` back to ``[B, L, heads * D]``."""
    batch, heads, length, dim = x.shape
    return x.transpose(1, 2).reshape(batch, length, heads * dim)


def expand_mask(mask: Tensor | None) -> Tensor | None:
    """Give a mask the four axes ``[B, heads, Lq, Lk]`` (size 1 where it is shared).

    Accepts ``[Lq, Lk]``, ``[B, Lq, Lk]`` and ``[B, heads, Lq, Lk]``.
    """
    if mask is None or mask.ndim == 4:
        return mask
    if mask.ndim == 2:
        return mask[None, None]
    if mask.ndim == 3:
        return mask[:, None]
    raise ValueError(f"attention mask must have 2, 3 or 4 axes, got shape {tuple(mask.shape)}")


def repeat_key_heads(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Repeat grouped key and value heads ``[B, groups, L, D]`` until there is one per query
    head."""
    groups = k.shape[1]
    if groups == heads:
        return k, v
    if heads % groups:
        raise ValueError(f"{heads} query heads cannot share {groups} key heads")
    repeats = heads // groups
    return k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
