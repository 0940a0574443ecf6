"""Attention kernels: each maps ``q, k, v [B, heads, L, D]`` and a mask to ``[B, heads, Lq, D]``.

All compute ``softmax(q k^T / sqrt(D) + mask) v``; they differ in speed and in how much of the score
matrix ``[B, heads, Lq, Lk]`` exists at one time. A mask is boolean (True = attend) or additive,
with four axes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.compiler import is_compiling as compiling
from torch.nn import functional as F

from comfy.devices import precision

CACHE_BYTES = 4 << 20  # scores of one slice that still fit a core's cache; measured on AVX-512 CPUs
SPLIT_BYTES = 1 << 28  # scores of one slice when memory, not cache, is the limit
LARGEST_BATCH = 1 << 15  # items of one call: CUDA starts at most 65,535 of them, or of their heads


def in_batches(
    kernel: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> Tensor:
    """A kernel's result, of many items in calls of `LARGEST_BATCH` (positions of a video that
    attend over its frames are items)."""
    if q.shape[0] <= LARGEST_BATCH:
        return kernel(q, k, v, mask)
    given = (q, k, v) if mask is None else (q, k, v, mask)
    parts = zip(*(x.expand(q.shape[0], -1, -1, -1).split(LARGEST_BATCH) for x in given))
    return torch.cat([kernel(*part) for part in parts])


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Torch's fused attention (flash or memory-efficient where the device has it)."""
    if mask is not None and mask.dtype != torch.bool and mask.dtype != q.dtype:
        mask = mask.to(q.dtype)
    if mask is None and not compiling() and _prefers_products(q, k):
        return split(q, k, v, budget_bytes=CACHE_BYTES)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _prefers_products(q: Tensor, k: Tensor) -> bool:
    """Whether plain products beat the fused CPU kernel: fp32 with few keys (77 text tokens).

    Measured on one AVX-512 core: 1.2-1.5 x faster for 64-128 keys, slower for more.
    """
    few_keys = 64 < k.shape[2] <= 128
    on_cpu = q.device.type == "cpu" and q.dtype == torch.float32
    return few_keys and on_cpu and q.shape[2] >= 64 and precision.tunes_cpu()


def basic(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """The textbook product with the whole score matrix at once."""
    weights = _scores(q, k, mask).softmax(dim=-1).to(v.dtype)
    batch, heads, length, _ = q.shape
    out = torch.bmm(weights.flatten(0, 1), v.reshape(batch * heads, *v.shape[2:]))
    return out.view(batch, heads, length, v.shape[-1])


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """Scaled scores ``[B, heads, Lq, Lk]`` in the dtype of q, mask applied."""
    batch, heads, length, dim = q.shape
    rows = q.reshape(batch * heads, length, dim)
    columns = k.reshape(batch * heads, k.shape[2], dim).transpose(1, 2)
    scores = torch.baddbmm(rows.new_empty(1, 1, 1), rows, columns, beta=0, alpha=dim**-0.5)
    scores = scores.view(batch, heads, length, k.shape[2])
    if mask is None:
        return scores
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mask, -torch.finfo(scores.dtype).max)
    return scores.add_(mask.to(scores.dtype))


def split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    budget_bytes: int = SPLIT_BYTES,
) -> Tensor:
    """The textbook product over slices of the queries: the scores of one slice fit
    ``budget_bytes``."""
    batch, heads, length, _ = q.shape
    row_bytes = 2 * batch * heads * k.shape[2] * q.element_size()  # scores and their softmax
    rows = max(1, budget_bytes // max(1, row_bytes))
    if rows >= length:
        return basic(q, k, v, mask)
    out = torch.empty(batch, heads, length, v.shape[-1], dtype=v.dtype, device=v.device)
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        part = _mask_chunk(mask, start, stop, 0, k.shape[2])
        out[:, :, start:stop] = basic(q[:, :, start:stop], k, v, part)
    return out


def sub_quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    query_chunk: int = 1024,
    key_chunk: int = 4096,
) -> Tensor:
    """Attention in chunks of queries and keys with a running softmax: memory O(chunk^2).

    Keeps, per query row, the largest score seen, the normaliser and the weighted sum of values.
    Many heads or items take fewer queries at a time, so that scores stay within `SPLIT_BYTES`.
    Source: Rabe and Staats 2021, https://arxiv.org/abs/2112.05682.
    """
    length = q.shape[2]
    row_bytes = 3 * 4 * q.shape[0] * q.shape[1] * min(key_chunk, k.shape[2])
    query_chunk = max(1, min(query_chunk, SPLIT_BYTES // max(1, row_bytes)))
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
    for start in range(0, length, query_chunk):
        stop = min(start + query_chunk, length)
        rows = q[:, :, start:stop]
        out[:, :, start:stop] = _running_softmax(rows, k, v, mask, start, key_chunk).to(v.dtype)
    return out


def _running_softmax(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, offset: int, key_chunk: int
) -> Tensor:
    """Exact attention of the queries q (rows offset.. of the mask) over keys taken in chunks;
    float32."""
    shape = q.shape[:3]
    largest = q.new_full((*shape, 1), -torch.inf, dtype=torch.float32)
    normaliser = torch.zeros_like(largest)
    weighted = q.new_zeros((*shape, v.shape[-1]), dtype=torch.float32)
    for start in range(0, k.shape[2], key_chunk):
        stop = min(start + key_chunk, k.shape[2])
        part = _mask_chunk(mask, offset, offset + q.shape[2], start, stop)
        scores = _scores(q, k[:, :, start:stop], part).float()
        # Rows that are masked out so far: float32 has nothing below this.
        scores = scores.clamp_(min=-torch.finfo(torch.float32).max)
        peak = torch.maximum(scores.amax(dim=-1, keepdim=True), largest)
        weights = (scores - peak).exp_()
        rescale = (largest - peak).exp_()
        normaliser = normaliser * rescale + weights.sum(dim=-1, keepdim=True)
        weighted = weighted * rescale + torch.matmul(weights.to(v.dtype), v[:, :, start:stop])
        largest = peak
    return weighted / normaliser if k.shape[2] else weighted  # of no keys nothing is seen


def _mask_chunk(mask: Tensor | None, q0: int, q1: int, k0: int, k1: int) -> Tensor | None:
    """The part of a (possibly broadcast) mask that belongs to one chunk of queries and keys."""
    if mask is None:
        return None
    if mask.shape[-2] != 1:
        mask = mask[..., q0:q1, :]
    if mask.shape[-1] != 1:
        mask = mask[..., k0:k1]
    return mask
