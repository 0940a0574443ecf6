"""Layers of Hunyuan-DiT; see `models`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy.ldm.common_dit import turn
from comfy.nn import attention, patches

NORM_EPS = 1e-6
PERIOD = 10000.0
Options = dict[str, Any]
Parts = dict[str, Any]


def position_angles(rows: int, columns: int, base: int, head: int, device: Any) -> Tensor:
    """Angles ``[rows * columns, head / 2]``: half of them for the column, half for the row.

    The picture lies in the middle of a square of ``base`` positions, its longer side filling it.
    """
    longer = max(rows, columns)
    angles = []
    for count, other in ((columns, rows), (rows, columns)):
        shown = base if count == longer else round(base / other * count)
        start = round((base - shown) / 2)
        places = start + torch.arange(count, device=device, dtype=torch.float32) * (shown / count)
        steps = torch.arange(0, head // 2, 2, device=device, dtype=torch.float32)
        angles.append(torch.outer(places, PERIOD ** -(steps / (head // 2))))
    column, row = angles
    both = [column[None].expand(rows, -1, -1), row[:, None].expand(-1, columns, -1)]
    return torch.cat(both, dim=-1).flatten(0, 1)


def place_of(parts: Parts) -> dict[str, Any]:
    return {"dtype": parts["dtype"], "device": parts["device"]}


def perceptron(width: int, inner: int, out: int, parts: Parts) -> nn.Sequential:
    linear, place = parts["operations"].Linear, place_of(parts)
    return nn.Sequential(linear(width, inner, **place), nn.SiLU(), linear(inner, out, **place))


class AttentionPool(nn.Module):
    """One vector for a text: the mean of its tokens attends to them."""

    def __init__(self, tokens: int, width: int, heads: int, out: int, parts: Parts) -> None:
        super().__init__()
        linear, place = parts["operations"].Linear, place_of(parts)
        self.heads = heads
        self.positional_embedding = nn.Parameter(torch.empty(tokens + 1, width, **place))
        self.k_proj, self.q_proj, self.v_proj = (linear(width, width, **place) for _ in range(3))
        self.c_proj = linear(width, out, **place)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, out]`` of ``x [B, L, width]``; tokens past those of training do not count."""
        positions = self.positional_embedding.to(x)
        x = x[:, : positions.shape[0] - 1]
        x = torch.cat([x.mean(dim=1, keepdim=True), x], dim=1) + positions[: x.shape[1] + 1]
        q, k, v = self.q_proj(x[:, :1]), self.k_proj(x), self.v_proj(x)
        return self.c_proj(attention.optimized_attention(q, k, v, self.heads))[:, 0]


class Attention(nn.Module):
    """What both attentions share: norms of queries and keys, turns, and the projection."""

    name = patches.OUTPUT

    def __init__(self, width: int, heads: int, has_norms: bool, precision: Any, parts: Parts):
        super().__init__()
        place = place_of(parts)
        self.heads, self.precision = heads, precision
        norm = {"eps": NORM_EPS, **place}
        make = parts["operations"].LayerNorm if has_norms else lambda *_, **__: nn.Identity()
        self.q_norm, self.k_norm = (make(width // heads, **norm) for _ in range(2))
        self.out_proj = parts["operations"].Linear(width, width, **place)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, angles: Tensor, is_self: bool, options: Options
    ) -> Tensor:
        """``q, k, v [B, L, D]``; keys have places only where the picture sees itself."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        q, k = turn(self.q_norm(q), angles), self.k_norm(k)
        k = turn(k, angles) if is_self else k
        seen = attention.optimized_attention(
            q, k, v, self.heads, skip_reshape=True, attn_precision=self.precision,
            transformer_options=options,
        )  # fmt: skip
        picture = (0, q.shape[2]) if is_self else None
        seen = patches.attention_output(seen, options, self.heads, picture, self.name)
        return self.out_proj(seen)


class SelfAttention(Attention):
    """Attention of the picture with itself."""

    def __init__(self, width: int, heads: int, has_norms: bool, precision: Any, parts: Parts):
        super().__init__(width, heads, has_norms, precision, parts)
        self.Wqkv = parts["operations"].Linear(width, 3 * width, **place_of(parts))

    def forward(self, x: Tensor, angles: Tensor, options: Options) -> Tensor:
        q, k, v = self.Wqkv(x).chunk(3, dim=-1)
        return self.attend(q, k, v, angles, True, options)


class CrossAttention(Attention):
    """Attention of the picture with the texts."""

    name = patches.CROSS_OUTPUT

    def __init__(
        self, width: int, text: int, heads: int, has_norms: bool, precision: Any, parts: Parts
    ) -> None:
        super().__init__(width, heads, has_norms, precision, parts)
        linear, place = parts["operations"].Linear, place_of(parts)
        self.q_proj, self.kv_proj = linear(width, width, **place), linear(text, 2 * width, **place)

    def forward(self, x: Tensor, text: Tensor, angles: Tensor, options: Options) -> Tensor:
        k, v = self.kv_proj(text).chunk(2, dim=-1)
        return self.attend(self.q_proj(x), k, v, angles, False, options)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int, inner: int, parts: Parts) -> None:
        super().__init__()
        linear, place = parts["operations"].Linear, place_of(parts)
        self.fc1, self.fc2 = linear(width, inner, **place), linear(inner, width, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class Block(nn.Module):
    """Attention among the patches, to the texts, and feed-forward; later layers join in what an
    earlier one saw.
    """

    compiles_alone = True

    def __init__(
        self,
        width: int,
        text: int,
        heads: int,
        inner: int,
        has_norms: bool,
        joins: bool,
        precision: Any,
        parts: Parts,
    ) -> None:
        super().__init__()
        linear, place = parts["operations"].Linear, place_of(parts)

        def norm(channels: int) -> nn.Module:
            return parts["operations"].LayerNorm(channels, eps=NORM_EPS, **place)

        self.norm1, self.norm2, self.norm3 = norm(width), norm(width), norm(width)
        self.attn1 = SelfAttention(width, heads, has_norms, precision, parts)
        self.attn2 = CrossAttention(width, text, heads, has_norms, precision, parts)
        self.mlp = FeedForward(width, inner, parts)
        self.default_modulation = nn.Sequential(nn.SiLU(), linear(width, width, **place))
        self.skip_norm = norm(2 * width) if joins else None
        self.skip_linear = linear(2 * width, width, **place) if joins else None

    def forward(
        self,
        x: Tensor,
        vec: Tensor,
        text: Tensor,
        angles: Tensor,
        skip: Tensor | None,
        options: Options,
    ) -> Tensor:
        """One layer over ``x [B, L, D]``; ``vec [B, D]`` shifts it, ``skip [B, L, D]`` is of an
        earlier layer.
        """
        if self.skip_linear is not None and self.skip_norm is not None:
            assert skip is not None
            x = self.skip_linear(self.skip_norm(torch.cat([x, skip], dim=-1)))
        shift = self.default_modulation(vec)[:, None]
        x = x + self.attn1(self.norm1(x) + shift, angles, options)
        x = x + self.attn2(self.norm3(x), text, angles, options)
        return x + self.mlp(self.norm2(x))


class FinalLayer(nn.Module):
    """A modulated norm and a projection to patches."""

    def __init__(self, width: int, out: int, parts: Parts) -> None:
        super().__init__()
        linear, place = parts["operations"].Linear, place_of(parts)
        norm = parts["operations"].LayerNorm
        self.norm_final = norm(width, elementwise_affine=False, eps=NORM_EPS, **place)
        self.linear = linear(width, out, **place)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), linear(width, 2 * width, **place))

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, dim=-1)
        return self.linear(torch.addcmul(shift, self.norm_final(x), 1 + scale))
