"""What MMDiT is made of: joint blocks of two streams, embeddings and the projection to patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy.ldm.common_dit import pad_to_patch_size, rms_norm
from comfy.nn import attention, patches
from comfy.nn.layout import tokens_of_patches

TIME_WAVES = 256
HEAD_SIZE = 64
NORM_EPS = 1e-6
Options = dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """Where and of what layers are made."""

    operations: Any
    dtype: Any
    device: Any

    def linear(self, width: int, out: int, bias: bool = True) -> nn.Module:
        """A linear layer."""
        return self.operations.Linear(width, out, bias=bias, dtype=self.dtype, device=self.device)

    def plain_norm(self, width: int) -> nn.Module:
        """A layer norm without weights."""
        return self.operations.LayerNorm(
            width, elementwise_affine=False, eps=NORM_EPS, dtype=self.dtype, device=self.device
        )


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``x * (1 + scale) + shift`` with ``[B, D]`` for all tokens."""
    return torch.addcmul(shift[:, None], x, 1 + scale[:, None])


class RMSNorm(nn.Module):
    """Division by the root mean square over the last axis, times a weight where told."""

    def __init__(
        self,
        dim: int,
        elementwise_affine: bool = False,
        eps: float = NORM_EPS,
        device: Any = None,
        dtype: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        weight = torch.empty(dim, dtype=dtype, device=device) if elementwise_affine else None
        self.weight = None if weight is None else nn.Parameter(weight)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Projections, and norms of queries and keys; attention itself spans both streams."""

    def __init__(
        self, width: int, heads: int, qk_norm: str | None, pre_only: bool, parts: Parts
    ) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = parts.linear(width, width * 3)
        if not pre_only:
            self.proj = parts.linear(width, width)
        self.ln_q, self.ln_k = _qk_norm(qk_norm, parts), _qk_norm(qk_norm, parts)

    def pre_attention(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[B, L, D]``."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.ln_q(q).flatten(2), self.ln_k(k).flatten(2), v.flatten(2)


def _qk_norm(kind: str | None, parts: Parts) -> nn.Module:
    """The norm of a head's queries or keys: none, "rms" or "ln"."""
    if kind is None:
        return nn.Identity()
    if kind == "rms":
        return RMSNorm(HEAD_SIZE, True, device=parts.device, dtype=parts.dtype)
    if kind == "ln":
        return parts.operations.LayerNorm(
            HEAD_SIZE, eps=NORM_EPS, dtype=parts.dtype, device=parts.device
        )
    raise ValueError(f"unknown norm of queries and keys {kind!r}; known: rms, ln")


class Mlp(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int, inner: int, parts: Parts) -> None:
        super().__init__()
        self.fc1, self.fc2 = parts.linear(width, inner), parts.linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class DismantledBlock(nn.Module):
    """One stream's half of a joint block, in the pieces before and after the attention.

    Attributes:
        pre_only: Whether it ends with the attention (the last block's text).
        x_block_self_attn: Whether the picture also attends to itself alone.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_ratio: float,
        qk_norm: str | None,
        parts: Parts,
        pre_only: bool = False,
        x_block_self_attn: bool = False,
    ) -> None:
        super().__init__()
        self.pre_only, self.x_block_self_attn = pre_only, x_block_self_attn
        self.norm1 = parts.plain_norm(width)
        self.attn = SelfAttention(width, heads, qk_norm, pre_only, parts)
        if x_block_self_attn:
            self.attn2 = SelfAttention(width, heads, qk_norm, False, parts)
        if not pre_only:
            self.norm2 = parts.plain_norm(width)
            self.mlp = Mlp(width, int(width * mlp_ratio), parts)
        self.n_mods = 2 if pre_only else 9 if x_block_self_attn else 6
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), parts.linear(width, self.n_mods * width))

    def before(self, x: Tensor, c: Tensor) -> tuple[Sequence[Tensor], tuple[Tensor, ...], Tensor]:
        """Modulations, q/k/v of the shared attention, and the normed x."""
        mods = self.adaLN_modulation(c).chunk(self.n_mods, dim=1)
        normed = self.norm1(x)
        return mods, self.attn.pre_attention(modulate(normed, mods[0], mods[1])), normed

    def after(self, x: Tensor, attn: Tensor, mods: Sequence[Tensor], normed: Tensor) -> Tensor:
        """Add the attention (and the stream's own), then the feed-forward."""
        gate, shift_mlp, scale_mlp, gate_mlp = mods[2:6]
        out = x + gate[:, None] * self.attn.proj(attn)
        if self.x_block_self_attn:
            shift, scale, gate = mods[6:9]
            q, k, v = self.attn2.pre_attention(modulate(normed, shift, scale))
            own = attention.optimized_attention(q, k, v, self.attn2.heads)
            out = out + gate[:, None] * self.attn2.proj(own)
        h = self.mlp(modulate(self.norm2(out), shift_mlp, scale_mlp))
        return out + gate_mlp[:, None] * h


class JointBlock(nn.Module):
    """A layer over both streams."""

    compiles_alone = True

    def __init__(
        self,
        width: int,
        heads: int,
        mlp_ratio: float,
        qk_norm: str | None,
        parts: Parts,
        pre_only: bool = False,
        x_block_self_attn: bool = False,
    ) -> None:
        super().__init__()
        shared = (width, heads, mlp_ratio, qk_norm, parts)
        self.context_block = DismantledBlock(*shared, pre_only=pre_only)
        self.x_block = DismantledBlock(*shared, x_block_self_attn=x_block_self_attn)

    def forward(
        self, context: Tensor, x: Tensor, c: Tensor, transformer_options: Options | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """``context [B, Lc, D]`` (None after the last block) and ``x [B, L, D]``; ``c [B, D]``
        modulates."""
        context_mods, context_qkv, context_normed = self.context_block.before(context, c)
        x_mods, x_qkv, x_normed = self.x_block.before(x, c)
        q, k, v = (torch.cat(pair, dim=1) for pair in zip(context_qkv, x_qkv))
        attn = attention.optimized_attention(
            q, k, v, self.x_block.attn.heads, transformer_options=transformer_options
        )
        picture = (context.shape[1], attn.shape[1])
        heads = self.x_block.attn.heads
        attn = patches.attention_output(attn, transformer_options, heads, picture)
        context_attn, x_attn = attn.split([context.shape[1], x.shape[1]], dim=1)
        new_context = None
        if not self.context_block.pre_only:
            new_context = self.context_block.after(
                context, context_attn, context_mods, context_normed
            )
        return new_context, self.x_block.after(x, x_attn, x_mods, x_normed)


class Embedder(nn.Module):
    """Two linear layers with SiLU between them, under the key ``mlp``."""

    def __init__(self, width: int, out: int, parts: Parts) -> None:
        super().__init__()
        self.mlp = nn.Sequential(parts.linear(width, out), nn.SiLU(), parts.linear(out, out))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class PatchEmbed(nn.Module):
    """Patches of a latent, padded to whole ones, as tokens."""

    def __init__(self, patch_size: int, channels: int, width: int, parts: Parts) -> None:
        super().__init__()
        self.patch_size = (patch_size, patch_size)
        self.proj = parts.operations.Conv2d(
            channels, width, patch_size, stride=patch_size, dtype=parts.dtype, device=parts.device
        )

    def forward(self, x: Tensor) -> Tensor:
        x = pad_to_patch_size(x, self.patch_size)
        return tokens_of_patches(self.proj(x))


class FinalLayer(nn.Module):
    """A modulated norm and a projection to patches."""

    def __init__(self, width: int, patch_size: int, channels: int, parts: Parts) -> None:
        super().__init__()
        self.norm_final = parts.plain_norm(width)
        self.linear = parts.linear(width, patch_size**2 * channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), parts.linear(width, 2 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))
