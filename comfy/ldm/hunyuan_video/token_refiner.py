"""The layers that HunyuanVideo lets over the tokens of a language model before its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from comfy.ldm.flux.layers import MLPEmbedder, timestep_embedding
from comfy.nn import attention

NORM_EPS = 1e-6
TIME_WAVES = 256
INNER = 4  # times the width, of the feed-forward
Parts = dict[str, Any]


class _SelfAttention(nn.Module):
    """Projections around an attention."""

    def __init__(self, width: int, parts: Parts) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.qkv = parts["operations"].Linear(width, 3 * width, **place)
        self.proj = parts["operations"].Linear(width, width, **place)


class RefinerBlock(nn.Module):
    """Attention and feed-forward, each followed by a gate made from a vector."""

    def __init__(self, width: int, heads: int, parts: Parts) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        operations = parts["operations"]
        self.heads = heads
        self.norm1 = operations.LayerNorm(width, eps=NORM_EPS, **place)
        self.self_attn = _SelfAttention(width, parts)
        self.norm2 = operations.LayerNorm(width, eps=NORM_EPS, **place)
        self.mlp = nn.Sequential(
            operations.Linear(width, INNER * width, **place),
            nn.SiLU(),
            operations.Linear(INNER * width, width, **place),
        )
        self.adaLN_modulation = nn.Sequential(
            nn.SiLU(), operations.Linear(width, 2 * width, **place)
        )

    def forward(self, x: Tensor, vec: Tensor, mask: Tensor | None) -> Tensor:
        """One layer over ``x [B, L, D]``; ``mask`` is added to scores ``[B, 1, L, L]``."""
        first, second = self.adaLN_modulation(vec)[:, None].chunk(2, dim=-1)
        q, k, v = self.self_attn.qkv(self.norm1(x)).chunk(3, dim=-1)
        seen = attention.optimized_attention(q, k, v, self.heads, mask=mask)
        x = x + self.self_attn.proj(seen) * first
        return x + self.mlp(self.norm2(x)) * second


class IndividualTokenRefiner(nn.Module):
    """The layers."""

    def __init__(self, width: int, heads: int, layers: int, parts: Parts) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RefinerBlock(width, heads, parts) for _ in range(layers))

    def forward(self, x: Tensor, vec: Tensor, mask: Tensor | None) -> Tensor:
        """``mask``: 1 for tokens, 0 for padding ``[B, L]``."""
        added = None
        if mask is not None:
            told = mask.bool()
            both = told[:, None, :, None] & told[:, None, None, :]
            added = torch.zeros(both.shape, dtype=x.dtype, device=x.device)
            added.masked_fill_(~both, torch.finfo(x.dtype).min)
        for block in self.blocks:
            x = block(x, vec, added)
        return x


class TokenRefiner(nn.Module):
    """Text tokens ``[B, L, T]`` to tokens of the network ``[B, L, D]``, by time and mean text."""

    def __init__(self, text_width: int, width: int, heads: int, layers: int, parts: Parts) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.input_embedder = parts["operations"].Linear(text_width, width, **place)
        self.t_embedder = MLPEmbedder(TIME_WAVES, width, **parts)
        self.c_embedder = MLPEmbedder(text_width, width, **parts)
        self.individual_token_refiner = IndividualTokenRefiner(width, heads, layers, parts)

    def forward(self, x: Tensor, times: Tensor, mask: Tensor | None) -> Tensor:
        """``times [B]`` in 0..1000."""
        waves = timestep_embedding(times, TIME_WAVES, time_factor=1.0)
        vec = self.t_embedder(waves.to(x.dtype))
        vec = vec + self.c_embedder(x.float().mean(dim=1).to(x.dtype))
        return self.individual_token_refiner(self.input_embedder(x), vec, mask)
