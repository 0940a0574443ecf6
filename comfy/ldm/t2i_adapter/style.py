"""The style adapter of T2I-Adapter: image encoder states as tokens beside the text.

Source: Mou et al. 2023, https://arxiv.org/abs/2302.08453.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.clip.text import quick_gelu


class QuickGELU(nn.Module):
    """The activation of the first CLIP models."""

    def forward(self, x: Tensor) -> Tensor:
        return quick_gelu(x)


class ResidualAttentionBlock(nn.Module):
    """Attention and feed-forward, each after a norm."""

    def __init__(self, width: int, heads: int, place: dict[str, Any], operations: Any) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True, **place)
        self.ln_1 = operations.LayerNorm(width, **place)
        self.mlp = nn.Sequential(
            OrderedDict(
                [
                    ("c_fc", operations.Linear(width, width * 4, **place)),
                    ("gelu", QuickGELU()),
                    ("c_proj", operations.Linear(width * 4, width, **place)),
                ]
            )
        )
        self.ln_2 = operations.LayerNorm(width, **place)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.ln_1(x)
        x = x + self.attn(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class StyleAdapter(nn.Module):
    """Learned tokens that attend to the states of an image encoder.

    Args:
        width: Width of the image encoder.
        context_dim: Width of a text token.
        num_head, n_layes: Heads and blocks (the second name is that of the published weights).
        num_token: Tokens that are given.
    """

    def __init__(
        self,
        width: int = 1024,
        context_dim: int = 768,
        num_head: int = 8,
        n_layes: int = 3,
        num_token: int = 4,
        device: Any = None,
        dtype: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype}
        blocks = [
            ResidualAttentionBlock(width, num_head, place, operations) for _ in range(n_layes)
        ]
        self.transformer_layes = nn.Sequential(*blocks)
        self.num_token = num_token
        self.style_embedding = nn.Parameter(torch.empty(1, num_token, width, **place))
        self.ln_post = operations.LayerNorm(width, **place)
        self.ln_pre = operations.LayerNorm(width, **place)
        self.proj = nn.Parameter(torch.empty(width, context_dim, **place))

    def forward(self, x: Tensor) -> Tensor:
        """States [B, L, width] -> tokens [B, num_token, context_dim]."""
        tokens = self.style_embedding.to(x).expand(x.shape[0], -1, -1)
        x = self.ln_pre(torch.cat([x, tokens], dim=1))
        x = self.transformer_layes(x)
        return self.ln_post(x[:, -self.num_token :]) @ self.proj.to(x)
