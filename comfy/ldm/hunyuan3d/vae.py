"""ShapeVAE of Hunyuan3D 2: a set of tokens becomes a field that is positive inside a shape.

A transformer turns the tokens into a description; a point asks it, by one cross-attention, whether
it lies inside. The field is evaluated on a grid, some points at a time. The encoder, which takes
points on a surface, is not built: nothing here makes them.
Source: https://github.com/Tencent-Hunyuan/Hunyuan3D-2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comfy import interrupt, ops
from comfy.nn import attention
from comfy.progress import ProgressBar

NORM_EPS = 1e-6
AXES = 3
BOUND = 1.01  # the grid reaches from -BOUND to BOUND along each axis
MOST_BYTES = 2**28  # of the widest layer over the points asked at a time
Parts = dict[str, Any]


def waves_of(points: Tensor, count: int) -> Tensor:
    """Coordinates ``[..., 3]``, their sines and cosines at frequencies 1, 2, 4, ...:
    ``[..., 3 * (2 * count + 1)]``."""
    frequencies = 2.0 ** torch.arange(count, dtype=points.dtype, device=points.device)
    angles = (points[..., None] * frequencies).flatten(-2)
    return torch.cat([points, angles.sin(), angles.cos()], dim=-1)


class NormedAttention(nn.Module):
    """Attention with norms of queries and keys, head by head (the turbo decoder has none)."""

    def __init__(self, head: int, has_norms: bool, parts: Parts) -> None:
        super().__init__()
        self.q_norm = _norm(head, parts) if has_norms else nn.Identity()
        self.k_norm = _norm(head, parts) if has_norms else nn.Identity()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of ``[B, L, heads, D]``; gives ``[B, L, heads * D]``."""
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attention.optimized_attention(q, k, v, q.shape[1], skip_reshape=True)


class SelfAttention(nn.Module):
    """Attention among the tokens; of each head come query, key and value side by side."""

    def __init__(self, width: int, heads: int, bias: bool, parts: Parts) -> None:
        super().__init__()
        self.heads = heads
        self.c_qkv = _linear(width, 3 * width, parts, bias)
        self.c_proj = _linear(width, width, parts)
        self.attention = NormedAttention(width // heads, True, parts)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_qkv(x).unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)
        return self.c_proj(self.attention(q, k, v))


class CrossAttention(nn.Module):
    """Attention of points to the description."""

    def __init__(self, width: int, heads: int, bias: bool, has_norms: bool, parts: Parts) -> None:
        super().__init__()
        self.heads = heads
        self.c_q = _linear(width, width, parts, bias)
        self.c_kv = _linear(width, 2 * width, parts, bias)
        self.c_proj = _linear(width, width, parts)
        self.attention = NormedAttention(width // heads, has_norms, parts)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q = self.c_q(x).unflatten(-1, (self.heads, -1))
        k, v = self.c_kv(seen).unflatten(-1, (self.heads, -1)).chunk(2, dim=-1)
        return self.c_proj(self.attention(q, k, v))


class FeedForward(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self, width: int, inner: int, parts: Parts) -> None:
        super().__init__()
        self.c_fc = _linear(width, inner, parts)
        self.c_proj = _linear(inner, width, parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(nn.functional.gelu(self.c_fc(x)))


class Block(nn.Module):
    """One layer of the transformer."""

    def __init__(self, width: int, heads: int, inner: int, bias: bool, parts: Parts) -> None:
        super().__init__()
        self.attn = SelfAttention(width, heads, bias, parts)
        self.ln_1, self.ln_2 = _norm(width, parts), _norm(width, parts)
        self.mlp = FeedForward(width, inner, parts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class CrossBlock(nn.Module):
    """One layer of points that look at the description."""

    def __init__(
        self, width: int, heads: int, inner: int, bias: bool, has_norms: bool, parts: Parts
    ) -> None:
        super().__init__()
        self.attn = CrossAttention(width, heads, bias, has_norms, parts)
        self.ln_1, self.ln_2, self.ln_3 = (_norm(width, parts) for _ in range(3))
        self.mlp = FeedForward(width, inner, parts)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x), self.ln_2(seen))
        return x + self.mlp(self.ln_3(x))


class Transformer(nn.Module):
    """The layers over the tokens."""

    def __init__(
        self, layers: int, width: int, heads: int, inner: int, bias: bool, parts: Parts
    ) -> None:
        super().__init__()
        blocks = (Block(width, heads, inner, bias, parts) for _ in range(layers))
        self.resblocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.resblocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class GeoSizes:
    """Sizes of the layer that points go through.

    Attributes:
        width, heads, inner: As of the transformer.
        num_freqs: Frequencies in which points are told.
        has_norms: Whether it norms queries, keys and its result; turbo does not.
    """

    width: int = 1024
    heads: int = 16
    inner: int = 4096
    num_freqs: int = 8
    has_norms: bool = True


class GeoDecoder(nn.Module):
    """How far inside the shape a point lies."""

    def __init__(self, sizes: GeoSizes, seen_width: int, bias: bool, parts: Parts) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.width
        self.query_proj = _linear(AXES * (2 * sizes.num_freqs + 1), width, parts)
        self.latents_proj: nn.Module = nn.Identity()
        if seen_width != width:
            self.latents_proj = _linear(seen_width, width, parts)
        self.cross_attn_decoder = CrossBlock(
            width, sizes.heads, sizes.inner, bias, sizes.has_norms, parts
        )
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.ln_post: nn.Module = nn.Identity()
        if sizes.has_norms:
            self.ln_post = parts["operations"].LayerNorm(width, **place)
        self.output_proj = _linear(width, 1, parts)

    def forward(self, points: Tensor, seen: Tensor) -> Tensor:
        """Values ``[B, N]`` at points ``[N, 3]`` float32 of descriptions ``[B, L, D]``, which
        `latents_proj` has brought to the points' width.
        """
        asked = waves_of(points, self.sizes.num_freqs).to(seen.dtype)
        x = self.query_proj(asked)[None].expand(seen.shape[0], -1, -1)
        x = self.cross_attn_decoder(x, seen)
        return self.output_proj(self.ln_post(x))[..., 0]


class ShapeVAE(nn.Module):
    """Tokens to a field on a grid.

    Args:
        embed_dim: Channels of a token.
        width, heads, inner: Of the transformer; inner is the width of its feed-forward.
        num_decoder_layers: Layers of the transformer.
        qkv_bias: Whether projections of the attention have a bias.
        geo: Sizes of the layer that points go through.
    """

    makes_shapes = True

    def __init__(
        self,
        embed_dim: int = 64,
        width: int = 1024,
        heads: int = 16,
        inner: int = 4096,
        num_decoder_layers: int = 16,
        qkv_bias: bool = False,
        geo: GeoSizes = GeoSizes(),
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        parts = {"dtype": dtype, "device": device, "operations": operations}
        self.widest = max(geo.inner, 2 * geo.width)
        self.post_kl = _linear(embed_dim, width, parts)
        self.transformer = Transformer(num_decoder_layers, width, heads, inner, qkv_bias, parts)
        self.geo_decoder = GeoDecoder(geo, width, qkv_bias, parts)

    def decode(
        self,
        latents: Tensor,
        bounds: float = BOUND,
        num_chunks: int = 8000,
        octree_resolution: int = 256,
        enable_pbar: bool = True,
    ) -> Tensor:
        """Field of tokens ``[B, C, L]`` on a grid ``[B, X, Z, Y]``; positive inside.

        Args:
            bounds: Half the side of the cube.
            num_chunks: Points asked at a time; fewer if they would take much memory.
            octree_resolution: Cells along a side; the grid has one point more.
            enable_pbar: Whether to report progress.
        Raises:
            InterruptProcessingException: The prompt was cancelled.
        """
        if octree_resolution < 1 or num_chunks < 1:
            raise ValueError(
                f"octree_resolution and num_chunks must be at least 1, got {octree_resolution} "
                f"and {num_chunks}"
            )
        seen = self.transformer(self.post_kl(latents.movedim(1, 2)))
        seen = self.geo_decoder.latents_proj(seen)
        side = octree_resolution + 1
        line = torch.linspace(-bounds, bounds, side, device=latents.device, dtype=torch.float32)
        count, batch = side**AXES, latents.shape[0]
        step = max(1, min(num_chunks, self._most_points(batch, seen.element_size())))
        field = torch.empty(batch, count, device=latents.device, dtype=torch.float32)
        bar = ProgressBar(count) if enable_pbar else None
        for start in range(0, count, step):
            interrupt.throw_exception_if_processing_interrupted()
            numbers = torch.arange(start, min(start + step, count), device=latents.device)
            places = (numbers // side**2, numbers // side % side, numbers % side)
            points = torch.stack([line[place] for place in places], dim=-1)
            field[:, start : start + step] = self.geo_decoder(points, seen)
            if bar is not None:
                bar.update(len(numbers))
        # The caller moves the first axis to the end: it gets [B, Z, Y, X].
        return field.unflatten(1, (side, side, side)).movedim(-2, -1)

    def _most_points(self, batch: int, item_bytes: int) -> int:
        return MOST_BYTES // (batch * self.widest * item_bytes)

    def encode(self, pixels: Tensor) -> Tensor:
        """Refuses: pictures are no shapes."""
        raise ValueError(
            f"the autoencoder of Hunyuan3D makes shapes of latents, not latents of pictures (shape "
            f"{tuple(pixels.shape)}); start from an EmptyLatentHunyuan3Dv2 node"
        )


def _linear(width_in: int, width_out: int, parts: Parts, bias: bool = True) -> Any:
    place = {"dtype": parts["dtype"], "device": parts["device"]}
    return parts["operations"].Linear(width_in, width_out, bias=bias, **place)


def _norm(width: int, parts: Parts) -> Any:
    place = {"dtype": parts["dtype"], "device": parts["device"]}
    return parts["operations"].LayerNorm(width, eps=NORM_EPS, **place)
