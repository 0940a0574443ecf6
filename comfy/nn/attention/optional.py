"""Attention kernels of optional packages, imported when first used; all need a CUDA-like device.

Each function has the form of ``kernels``: ``q, k, v [B, heads, L, D]`` and a mask to ``[B, heads,
Lq, D]``. Where a package cannot do what is asked (a mask, say, or a tensor on the CPU), the fused
kernel of torch does it: that is a limit of the package, not an error. Where it was expected to and
failed (an accelerator it was not built for), that is said once.
"""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch
from torch import Tensor

from comfy.nn.attention import kernels

logger = logging.getLogger(__name__)

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = {"flash": 256, "sage": 128}
MASK_ALIGNMENT = 8  # rows of a mask for xFormers begin at multiples of so many cells


def is_installed(package: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """FlashAttention: no mask, half precision only, head sizes up to 256."""
    if not _fits("flash", q, mask):
        return kernels.fused(q, k, v, mask)
    try:
        from flash_attn import flash_attn_func

        out = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    except (RuntimeError, ImportError) as error:
        return _instead("flash_attn", error, q, k, v, mask)
    return out.transpose(1, 2)


def sage(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """SageAttention (8-bit scores): no mask, half precision, head sizes up to 128."""
    if not _fits("sage", q, mask):
        return kernels.fused(q, k, v, mask)
    try:
        from sageattention import sageattn

        return sageattn(q, k, v, is_causal=False, tensor_layout="HND")
    except (RuntimeError, ImportError) as error:
        return _instead("sageattention", error, q, k, v, mask)


def xformers(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """xFormers' memory-efficient attention; masks are made additive, and aligned as it asks."""
    if q.device.type == "cpu":
        return kernels.fused(q, k, v, mask)
    try:
        from xformers.ops import memory_efficient_attention

        bias = None if mask is None else aligned_bias(mask, q, k.shape[2])
        out = memory_efficient_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_bias=bias
        )
    except (RuntimeError, ImportError, ValueError, NotImplementedError) as error:
        return _instead("xformers", error, q, k, v, mask)
    return out.transpose(1, 2)


def aligned_bias(mask: Tensor, q: Tensor, keys: int) -> Tensor:
    """A mask as numbers to add, ``[B, heads, Lq, keys]``, a view of rows of aligned length."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, torch.finfo(q.dtype).min)
    width = -(-keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
    bias = q.new_zeros((*q.shape[:3], width))[..., :keys]
    return bias.copy_(mask)


def _fits(kernel: str, q: Tensor, mask: Tensor | None) -> bool:
    small = q.shape[-1] <= LARGEST_HEAD[kernel]
    return mask is None and q.dtype in HALF and small and q.device.type != "cpu"


def _instead(
    package: str, error: Exception, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> Tensor:
    """Torch's kernel after a package failed; a lack of memory is passed on."""
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    _say_once(package, str(error))
    return kernels.fused(q, k, v, mask)


@functools.lru_cache(maxsize=8)
def _say_once(package: str, reason: str) -> None:
    logger.warning("%s failed, so torch's attention is used in its place: %s", package, reason)
