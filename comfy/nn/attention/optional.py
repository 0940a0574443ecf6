"""Attention kernels of optional packages, imported when first used; all need a CUDA-like device.

Each function has the form of ``kernels``: ``q, k, v [B, heads, L, D]`` and a mask to ``[B, heads,
Lq, D]``. Where a package cannot do what is asked (a mask, say), the fused kernel of torch does it:
that is a limit of the package, not an error.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from comfy.nn.attention import kernels

HALF = (torch.float16, torch.bfloat16)


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """FlashAttention: no mask, half precision only."""
    from flash_attn import flash_attn_func

    if mask is not None or q.dtype not in HALF:
        return kernels.fused(q, k, v, mask)
    out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2)


def sage(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """SageAttention (8-bit scores): no mask, half precision, head sizes up to 128."""
    from sageattention import sageattn

    if mask is not None or q.dtype not in HALF or q.shape[-1] > 128:
        return kernels.fused(q, k, v, mask)
    return sageattn(q, k, v, is_causal=False, tensor_layout="HND")


def xformers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """xFormers' memory-efficient attention; masks are made additive and contiguous."""
    from xformers.ops import memory_efficient_attention

    if mask is not None:
        if mask.dtype == torch.bool:
            floor = torch.finfo(q.dtype).min
            mask = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(
                ~mask, floor
            )
        mask = mask.to(q.dtype).expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2]).contiguous()
    out = memory_efficient_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_bias=mask
    )
    return out.transpose(1, 2)
