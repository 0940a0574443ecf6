"""Names of other servers' quantised tensors and kernels, for custom nodes.

Here an encoded weight is a plain tensor and its layer knows the code (`comfy.ops.encoded`), so no
weight of this server is a `QuantizedTensor`. `ck` stands for the package of kernels that other
servers bring (comfy-kitchen): it is the package where it is installed, else the same functions in
plain torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

PACKAGE = "comfy_kitchen"


class QuantizedTensor(torch.Tensor):
    """A tensor stored in a code, of servers that keep code and data together."""


def rms_rope_split_half(
    q: Tensor,
    k: Tensor,
    freqs_cis: Tensor,
    q_scale: Tensor,
    k_scale: Tensor | None = None,
    epsilon: float = 1e-6,
    rot_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    """Queries and keys, each head divided by its root mean square, scaled and turned by its place.

    Args:
        q, k: ``[..., D]``.
        freqs_cis: Rotations ``[..., R / 2, 2, 2]``; number i turns channels i and i + R / 2.
        q_scale, k_scale: ``[D]``; keys take that of queries if they have none.
        rot_dim: R, how many of the first channels are turned; 0 is all.
    """
    scales = (q_scale, q_scale if k_scale is None else k_scale)
    turned_q, turned_k = (
        _turned(_normed(x, scale, epsilon), freqs_cis, rot_dim) for x, scale in zip((q, k), scales)
    )
    return turned_q, turned_k


def rms_rope_split_half_(
    q: Tensor,
    k: Tensor,
    freqs_cis: Tensor,
    q_scale: Tensor,
    k_scale: Tensor | None = None,
    epsilon: float = 1e-6,
    rot_dim: int = 0,
) -> tuple[Tensor, Tensor]:
    """As `rms_rope_split_half`, in the memory of `q` and `k`."""
    made = rms_rope_split_half(q, k, freqs_cis, q_scale, k_scale, epsilon, rot_dim)
    return q.copy_(made[0]), k.copy_(made[1])


def _normed(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], scale.to(x), epsilon)


def _turned(x: Tensor, rotations: Tensor, count: int) -> Tensor:
    """``x [..., D]`` with its first channels turned in pairs."""
    count = count or x.shape[-1]
    wide = x[..., :count].to(rotations.dtype)
    first, second = wide.chunk(2, dim=-1)
    halves = [rotations[..., row, 0] * first + rotations[..., row, 1] * second for row in range(2)]
    return torch.cat([*(half.to(x.dtype) for half in halves), x[..., count:]], dim=-1)


def __getattr__(name: str) -> Any:
    """The package of kernels, looked for when it is asked for.

    Raises:
        AttributeError: Another name was asked for.
    """
    if name != "ck":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec(PACKAGE) is not None:
        return importlib.import_module(PACKAGE)
    return SimpleNamespace(
        rms_rope_split_half=rms_rope_split_half, rms_rope_split_half_=rms_rope_split_half_
    )
