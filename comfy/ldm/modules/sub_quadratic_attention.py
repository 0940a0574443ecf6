"""Chunked attention, under the name custom nodes import."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comfy.nn.attention import kernels


def efficient_dot_product_attention(
    query: Tensor,
    key_t: Tensor,
    value: Tensor,
    query_chunk_size: int = 1024,
    kv_chunk_size: int | None = None,
    kv_chunk_size_min: int | None = None,
    use_checkpoint: bool = True,
    upcast_attention: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention in chunks of queries and keys.

    Args:
        query: ``[B * heads, Lq, D]``.
        key_t: Keys, transposed: ``[B * heads, D, Lk]``.
        value: ``[B * heads, Lk, D]``.
        query_chunk_size, kv_chunk_size: Sizes of the chunks.
        kv_chunk_size_min, use_checkpoint: Accepted for compatibility.
        upcast_attention: Compute scores in float32.
        mask: Broadcasts to ``[B * heads, Lq, Lk]``.
    Returns:
        ``[B * heads, Lq, D]``.
    """
    del kv_chunk_size_min, use_checkpoint
    keys = key_t.transpose(1, 2)
    if upcast_attention:
        query, keys = query.float(), keys.float()
    chunks: dict[str, Any] = {"query_chunk": query_chunk_size}
    if kv_chunk_size is not None:
        chunks["key_chunk"] = kv_chunk_size
    expanded = None if mask is None else mask[None]
    out = kernels.sub_quadratic(query[None], keys[None], value[None], expanded, **chunks)
    return out[0]
