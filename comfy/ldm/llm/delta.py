"""Gated delta rule: attention whose memory is a matrix of fixed size, not the keys of all tokens.

A token with key k, value v, decay a and strength b turns the matrix S into
``a S + b k (v - a S^T k)^T`` and reads ``S^T q``: what S said of k gives way to v. Tokens are read
in pieces, within which products of matrices take the place of single steps.
Source: Yang et al. 2024, https://arxiv.org/abs/2412.06464, sections 3.1 to 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy.ldm.common_dit import rms_norm
from comfy.ldm.llm.cache import DeltaCache

PIECE = 64  # tokens; more take more products of pairs, fewer more steps
LENGTH_EPS = 1e-6  # of the lengths that keys and queries are divided by


@dataclass(frozen=True)
class DeltaSizes:
    """Sizes of such attention; defaults are those of Qwen 3.5 4B and 9B.

    Attributes:
        key_heads, value_heads: Several heads of values share one of keys and queries.
        key_width, value_width: Channels of a head.
        kernel: How many tokens the convolution over queries, keys and values sees.
    """

    key_heads: int = 16
    value_heads: int = 32
    key_width: int = 128
    value_width: int = 128
    kernel: int = 4

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} heads of values cannot share {self.key_heads} heads of keys"
            )

    @property
    def keys(self) -> int:
        """Channels of all keys."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Channels of all values."""
        return self.value_heads * self.value_width

    def state_bytes(self) -> int:
        """Bytes of what is kept of a text, in one layer."""
        matrices = self.value_heads * self.key_width * self.value_width
        return torch.float32.itemsize * (matrices + (2 * self.keys + self.values) * self.kernel)

    def reading_bytes(self) -> int:
        """Bytes that live at once for each token that is read."""
        return torch.float32.itemsize * 2 * (2 * self.keys + 2 * self.values)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What tokens read ``[B, heads, L, V]``, and the matrices behind them.

    Args:
        q, k: ``[B, heads, L, K]`` float32.
        v: ``[B, heads, L, V]``.
        log_decay: ``[B, heads, L]``, at most 0.
        strength: ``[B, heads, L]`` in 0..1.
        state: Matrices before them ``[B, heads, K, V]``.
    """
    read: list[Tensor] = []
    for start in range(0, q.shape[2], PIECE):
        piece = slice(start, start + PIECE)
        out, state = _piece(
            q[:, :, piece],
            k[:, :, piece],
            v[:, :, piece],
            log_decay[:, :, piece],
            strength[:, :, piece],
            state,
        )
        read.append(out)
    return torch.cat(read, dim=2), state


def _piece(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`delta_rule` of a few tokens at once.

    What each token corrects depends on the corrections before it: a triangular system of equations.
    """
    total = log_decay.cumsum(dim=-1)  # since the piece began
    length = k.shape[2]
    earlier = torch.ones(length, length, dtype=torch.bool, device=k.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~earlier, -torch.inf).exp()
    since_start = total.exp()[..., None]
    wanted = strength[..., None] * (v - since_start * (k @ state))
    overlaps = strength[..., None] * (k @ k.mT) * between  # its diagonal is taken for ones
    written = torch.linalg.solve_triangular(overlaps, wanted, upper=False, unitriangular=True)
    out = since_start * (q @ state) + ((q @ k.mT) * between) @ written
    until_end = (total[..., -1:] - total).exp()[..., None]
    return out, since_start[..., -1:, :] * state + (k * until_end).mT @ written


class GatedNorm(nn.Module):
    """Division by the root mean square, times a weight, times a gate."""

    def __init__(self, width: int, eps: float, **place: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, **place))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Of float32."""
        return rms_norm(x, self.weight.to(x), self.eps) * functional.silu(gate.float())


class GatedDelta(nn.Module):
    """Attention by the gated delta rule."""

    def __init__(
        self, width: int, sizes: DeltaSizes, eps: float, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.sizes = sizes
        mixed = 2 * sizes.keys + sizes.values
        self.in_proj_qkv = operations.Linear(width, mixed, bias=False, **place)
        self.in_proj_z = operations.Linear(width, sizes.values, bias=False, **place)
        self.in_proj_b = operations.Linear(width, sizes.value_heads, bias=False, **place)
        self.in_proj_a = operations.Linear(width, sizes.value_heads, bias=False, **place)
        self.conv1d = operations.Conv1d(
            mixed, mixed, sizes.kernel, groups=mixed, bias=False, **place
        )
        self.dt_bias = nn.Parameter(torch.empty(sizes.value_heads, **place))
        self.A_log = nn.Parameter(torch.empty(sizes.value_heads, **place))
        self.norm = GatedNorm(sizes.value_width, eps, **place)
        self.out_proj = operations.Linear(sizes.values, width, bias=False, **place)

    def forward(self, x: Tensor, cache: DeltaCache | None = None) -> Tensor:
        """Of states ``[B, L, D]``; padding has to stand behind the text, which does not see it."""
        sizes, cache = self.sizes, DeltaCache() if cache is None else cache
        mixed = functional.silu(self.conv1d(cache.window(self.in_proj_qkv(x).mT, sizes.kernel)))
        q, k, v = mixed.mT.float().split([sizes.keys, sizes.keys, sizes.values], dim=-1)
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in ((q, sizes.key_heads), (k, sizes.key_heads), (v, sizes.value_heads))
        )
        shared = sizes.value_heads // sizes.key_heads
        q = _of_length_one(q).repeat_interleave(shared, dim=1) * sizes.key_width**-0.5
        k = _of_length_one(k).repeat_interleave(shared, dim=1)
        step = functional.softplus(self.in_proj_a(x).float() + self.dt_bias.to(x.device).float())
        log_decay = -self.A_log.to(x.device).float().exp() * step
        strength = self.in_proj_b(x).float().sigmoid()
        state = cache.state
        if state is None:
            state = v.new_zeros(len(v), sizes.value_heads, sizes.key_width, sizes.value_width)
        read, cache.state = delta_rule(q, k, v, log_decay.mT, strength.mT, state)
        gate = self.in_proj_z(x).unflatten(-1, (sizes.value_heads, -1))
        return self.out_proj(self.norm(read.transpose(1, 2), gate).flatten(2).to(x.dtype))


def _of_length_one(x: Tensor) -> Tensor:
    return x * (x.square().sum(dim=-1, keepdim=True) + LENGTH_EPS).rsqrt()
