"""Layers of the transformers of LTX video.

Source: HaCohen et al. 2024, https://arxiv.org/abs/2501.00103.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy.ldm.common_dit import rms_norm
from comfy.ldm.lightricks.rotations import Turn, rotate
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding

TIME_WAVES = 256
NORM_EPS, QK_EPS = 1e-6, 1e-5
Options = dict[str, Any]


class RMSNorm(nn.Module):
    """Division by the root mean square, times a weight."""

    def __init__(self, dim: int, eps: float = QK_EPS, **place: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, **place))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x), self.eps)


class Attention(nn.Module):
    """Attention to the tokens themselves or to others, queries and keys normed as a whole.

    Args:
        width, seen_width: Of the tokens, and of those they look at.
        inner: Width of all heads together; None: that of the tokens.
        eps: Of the norms.
        is_patched: Whether custom nodes may change what the heads give.
    """

    def __init__(
        self,
        width: int,
        seen_width: int,
        heads: int,
        parts: Options,
        inner: int | None = None,
        eps: float = QK_EPS,
        is_patched: bool = False,
    ) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        linear = parts["operations"].Linear
        self.heads, self.is_patched = heads, is_patched
        inner = width if inner is None else inner
        self.q_norm, self.k_norm = RMSNorm(inner, eps, **place), RMSNorm(inner, eps, **place)
        self.to_q = linear(width, inner, **place)
        self.to_k, self.to_v = (
            linear(seen_width, inner, **place),
            linear(seen_width, inner, **place),
        )
        self.to_out = nn.Sequential(linear(inner, width, **place), nn.Identity())

    def forward(
        self,
        x: Tensor,
        seen: Tensor | None = None,
        mask: Tensor | None = None,
        turn: Turn | None = None,
        options: Options | None = None,
        seen_turn: Turn | None = None,
    ) -> Tensor:
        """What ``x [B, N, D]`` makes of others, which turn as it does unless told otherwise."""
        seen = x if seen is None else seen
        q, k, v = self.q_norm(self.to_q(x)), self.k_norm(self.to_k(seen)), self.to_v(seen)
        if turn is not None:
            q, k = rotate(q, turn), rotate(k, turn if seen_turn is None else seen_turn)
        out = attention.optimized_attention(
            q, k, v, self.heads, mask=mask, transformer_options=options
        )
        if self.is_patched:
            out = patches.attention_output(out, options, self.heads, (0, x.shape[1]))
        return self.to_out(out)


class _Gelu(nn.Module):
    """A linear layer with GELU behind it."""

    def __init__(self, width: int, inner: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.proj = parts["operations"].Linear(width, inner, **place)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate="tanh")


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        last = parts["operations"].Linear(4 * width, width, **place)
        self.net = nn.Sequential(_Gelu(width, 4 * width, parts), nn.Identity(), last)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def normed(x: Tensor) -> Tensor:
    """Division by the root mean square."""
    return rms_norm(x, None, NORM_EPS)


class TimestepEmbedder(nn.Module):
    """Two linear layers with SiLU between them, over waves of times."""

    def __init__(self, width: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.linear_1 = parts["operations"].Linear(TIME_WAVES, width, **place)
        self.linear_2 = parts["operations"].Linear(width, width, **place)

    def forward(self, times: Tensor, dtype: torch.dtype) -> Tensor:
        waves = timestep_embedding(times, TIME_WAVES).to(dtype)
        return self.linear_2(F.silu(self.linear_1(waves)))


class AdaLayerNormSingle(nn.Module):
    """What modulates all blocks, `count` times the width, and the embedded time itself."""

    def __init__(self, width: int, parts: Options, count: int = 6) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.emb = nn.ModuleDict({"timestep_embedder": TimestepEmbedder(width, parts)})
        self.linear = parts["operations"].Linear(width, count * width, **place)

    def forward(self, times: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        embedded = self.emb["timestep_embedder"](times, dtype)
        return self.linear(F.silu(embedded)), embedded


class CaptionProjection(nn.Module):
    """Text tokens to the width of the network."""

    def __init__(self, text_width: int, width: int, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.linear_1 = parts["operations"].Linear(text_width, width, **place)
        self.linear_2 = parts["operations"].Linear(width, width, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(x), approximate="tanh"))
