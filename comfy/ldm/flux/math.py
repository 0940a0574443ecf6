"""Rotary positions and attention of Flux.

Source: Su et al. 2021, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling as compiling

from comfy.nn import attention as back_ends

TWO_VECTORS = 16  # complex numbers that torch multiplies in one go on any CPU
OF_A_THREAD = 32768  # results per thread: above it torch takes another one


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pe: Tensor | None,
    mask: Tensor | None = None,
    transformer_options: dict[str, Any] | None = None,
) -> Tensor:
    """Attention of ``q, k, v [B, heads, L, D]`` with positions; gives ``[B, L, heads * D]``."""
    if pe is not None:
        q, k = apply_rope(q, k, pe)
    return back_ends.optimized_attention(
        q, k, v, q.shape[1], mask=mask, skip_reshape=True, transformer_options=transformer_options
    )


def rope(pos: Tensor, dim: int, theta: float) -> Tensor:
    """Rotations of positions ``[B, L]``: ``[B, L, dim / 2, 2, 2]`` float32.

    The i-th pair of channels turns by ``pos * theta^(-2i / dim)``. Raises ValueError for odd dims.
    """
    if dim % 2:
        raise ValueError(f"rotary embedding of an odd number of channels: {dim}")
    device = pos.device if pos.device.type not in ("mps", "xpu") else torch.device("cpu")
    scale = torch.linspace(0, (dim - 2) / dim, dim // 2, dtype=torch.float64, device=device)
    angle = pos.to(device, torch.float32)[..., None] * (1.0 / theta**scale)
    cos, sin = angle.cos(), angle.sin()
    matrix = torch.stack([cos, -sin, sin, cos], dim=-1)
    return matrix.unflatten(-1, (2, 2)).to(pos.device, torch.float32)


def apply_rope1(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Turn neighbouring channels of ``x [..., L, D]`` by rotations ``[..., L, D / 2, 2, 2]``."""
    pairs = x.to(freqs_cis.dtype).unflatten(-1, (-1, 2))
    if _are_complex(pairs, freqs_cis):
        # The same products and sums in one pass: a fifth of the time.
        turns = torch.view_as_complex(freqs_cis[..., 0].contiguous())
        turned = torch.view_as_real(torch.view_as_complex(pairs) * turns)
    else:
        turned = freqs_cis[..., 0] * pairs[..., :1] + freqs_cis[..., 1] * pairs[..., 1:]
    return turned.flatten(-2).to(x.dtype)


def _are_complex(pairs: Tensor, matrices: Tensor) -> bool:
    """Whether pairs and matrices on a CPU may be read as complex numbers.

    The pairs have to lie side by side in memory. The matrices have to be rotations, which those of
    `rope` are and those of custom nodes need not be.
    """
    return (
        pairs.device.type == "cpu"
        and pairs.dtype in (torch.float32, torch.float64)
        and not compiling()
        and not (pairs.requires_grad or matrices.requires_grad)
        and pairs.stride(-1) == 1
        and not any(step % 2 for step in (*pairs.stride()[:-1], pairs.storage_offset()))
        and _ends_with_vectors(torch.broadcast_shapes(pairs.shape[:-1], matrices.shape[:-2]))
        and torch.equal(matrices[..., 0, 0], matrices[..., 1, 1])
        and torch.equal(matrices[..., 0, 1], -matrices[..., 1, 0])
    )


def _ends_with_vectors(shape: torch.Size) -> bool:
    """Whether a product of complex numbers fills the processor's vectors to the last number.

    What is left over, at the end of a row or of a thread's share, is computed one by one and
    rounded differently.
    """
    count = shape.numel()
    threads = min(torch.get_num_threads(), -(-count // OF_A_THREAD))
    return count > 0 and shape[-1] % TWO_VECTORS == 0 and -(-count // threads) % TWO_VECTORS == 0


def apply_rope(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rope1` for queries and keys."""
    return apply_rope1(xq, freqs_cis), apply_rope1(xk, freqs_cis)
