"""The layers of Lumina 2 and Z-Image; `comfy.ldm.lumina.model` puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy.ldm.common_dit import RMSNorm
from comfy.ldm.flux.math import apply_rope1
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding

TIME_WAVES = 256
Z_MODULATION_WIDTH = 256  # of Z-Image's time embedding
HALF_LIMIT = 65504  # largest float16
Options = dict[str, Any]


def feed_forward_width(dim: int, multiplier: float, multiple_of: int) -> int:
    """Channels inside a feed-forward, in whole multiples."""
    return -(-int(multiplier * dim) // multiple_of) * multiple_of


class LuminaSizes:
    """Sizes that all layers share."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, inner: int, qk_norm: bool) -> None:
        if dim % n_heads or n_heads % n_kv_heads:
            raise ValueError(
                f"{dim} channels, {n_heads} heads and {n_kv_heads} heads of keys do not divide"
            )
        self.dim, self.n_heads, self.n_kv_heads = dim, n_heads, n_kv_heads
        self.inner, self.qk_norm = inner, qk_norm
        self.norm_eps = 1e-5


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    freqs: Tensor,
    mask: Tensor | None,
    options: Options | None,
    picture: Sequence[int] | None,
) -> Tensor:
    """Attention ``[B, L, D]`` of normed queries ``[B, heads, L, size]`` to fewer heads of keys and
    values, each for a group of them.

    Args:
        freqs: Rotations ``[B, 1, L, size / 2, 2, 2]``.
        mask: Is added to the scores.
        picture: Start and stop of the picture's tokens, which patches of nodes see; else None.
    """
    heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    q, k = apply_rope1(q, freqs), apply_rope1(k, freqs)
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    seen = attention.optimized_attention(
        q, k, v, heads, mask=mask, skip_reshape=True, transformer_options=options
    )
    return seen if picture is None else patches.attention_output(seen, options, heads, picture)


class JointAttention(nn.Module):
    """Attention of all tokens, with fewer heads of keys and values if so configured."""

    def __init__(
        self, dim: int, heads: int, groups: int, qk_norm: bool, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        size = dim // heads
        self.qkv = operations.Linear(dim, (heads + 2 * groups) * size, bias=False, **place)
        self.out = operations.Linear(heads * size, dim, bias=False, **place)
        self.q_norm: nn.Module = RMSNorm(size, 1e-6, **place) if qk_norm else nn.Identity()
        self.k_norm: nn.Module = RMSNorm(size, 1e-6, **place) if qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        freqs: Tensor,
        options: Options | None,
        picture: Sequence[int] | None = None,
    ) -> Tensor:
        """``x [B, L, D]`` at rotations ``freqs [B, 1, L, size / 2, 2, 2]``.

        Args:
            picture: Start and stop of the picture's tokens, where they stand with the text's.
        """
        parts = self.qkv(x).unflatten(-1, (self.heads + 2 * self.groups, -1)).transpose(1, 2)
        q, k, v = parts.split([self.heads, self.groups, self.groups], dim=1)
        q, k = self.q_norm(q), self.k_norm(k)
        return self.out(attend(q, k, v, freqs, mask, options, picture))


class FeedForward(nn.Module):
    """Feed-forward with a gate."""

    def __init__(self, dim: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.w1 = operations.Linear(dim, inner, bias=False, **place)
        self.w2 = operations.Linear(inner, dim, bias=False, **place)
        self.w3 = operations.Linear(dim, inner, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(_finite_half(functional.silu(self.w1(x)) * self.w3(x)))


def _finite_half(x: Tensor) -> Tensor:
    """x without the infinities float16 may overflow to."""
    if x.dtype != torch.float16:
        return x
    return torch.nan_to_num(x, nan=0.0, posinf=HALF_LIMIT, neginf=-HALF_LIMIT)


class JointTransformerBlock(nn.Module):
    """A layer with norms before and after each part; modulated by time if there is a width."""

    compiles_alone = True

    def __init__(
        self, sizes: LuminaSizes, modulation_width: int | None, z_image: bool, operations: Any,
        **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        dim, eps = sizes.dim, sizes.norm_eps
        self.attention = JointAttention(
            dim, sizes.n_heads, sizes.n_kv_heads, sizes.qk_norm, operations, **place
        )
        self.feed_forward = FeedForward(dim, sizes.inner, operations, **place)
        for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
            setattr(self, name, RMSNorm(dim, eps, **place))
        self.adaLN_modulation: nn.Sequential | None = None
        if modulation_width is not None:
            linear = operations.Linear(modulation_width, 4 * dim, **place)
            layers = [linear] if z_image else [nn.SiLU(), linear]
            self.adaLN_modulation = nn.Sequential(*layers)

    attention_norm1: nn.Module
    attention_norm2: nn.Module
    ffn_norm1: nn.Module
    ffn_norm2: nn.Module

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        freqs: Tensor,
        adaln_input: Tensor | None = None,
        transformer_options: Options | None = None,
        picture: Sequence[int] | None = None,
    ) -> Tensor:
        """One layer over ``x [B, L, D]``; ``picture`` as the attention takes it."""
        if self.adaLN_modulation is None:
            normed = self.attention_norm1(x)
            seen = self.attention(normed, mask, freqs, transformer_options, picture)
            x = x + self.attention_norm2(_finite_half(seen))
            return x + self.ffn_norm2(_finite_half(self.feed_forward(self.ffn_norm1(x))))
        made = self.adaLN_modulation(adaln_input)[:, None].chunk(4, dim=-1)
        scale, gate, scale_mlp, gate_mlp = made
        normed = self.attention_norm1(x) * (1 + scale)
        seen = self.attention(normed, mask, freqs, transformer_options, picture)
        x = x + gate.tanh() * self.attention_norm2(_finite_half(seen))
        inner = self.feed_forward(self.ffn_norm1(x) * (1 + scale_mlp))
        return x + gate_mlp.tanh() * self.ffn_norm2(_finite_half(inner))


class TimestepEmbedder(nn.Module):
    """Times as vectors."""

    def __init__(self, width: int, out: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            operations.Linear(TIME_WAVES, width, **place),
            nn.SiLU(),
            operations.Linear(width, out, **place),
        )

    def forward(self, t: Tensor, like: Tensor) -> Tensor:
        return self.mlp(timestep_embedding(t, TIME_WAVES).to(like.dtype))


class FinalLayer(nn.Module):
    """A scaled norm and a projection to patches."""

    def __init__(self, dim: int, out: int, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.norm_final = operations.LayerNorm(dim, elementwise_affine=False, eps=1e-6, **place)
        self.linear = operations.Linear(dim, out, **place)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), operations.Linear(width, dim, **place))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return self.linear(self.norm_final(x) * (1 + self.adaLN_modulation(c)[:, None]))
