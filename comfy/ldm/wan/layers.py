"""Layers of Wan: attention over patches of a video and over text, blocks, embedders, the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.common_dit import rms_norm
from comfy.ldm.flux.math import apply_rope1
from comfy.nn import attention, patches

NORM_EPS = 1e-5  # of the layer norms around pictures
PIXELS_PER_CELL = 8
Options = dict[str, Any]


class WanRMSNorm(nn.Module):
    """Division by the root mean square over all heads together, times a weight."""

    def __init__(self, dim: int, eps: float, dtype: Any = None, device: Any = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.to(x), self.eps)


class WanSelfAttention(nn.Module):
    """Attention of all patches with all, at rotary positions."""

    def __init__(
        self, dim: int, num_heads: int, qk_norm: bool, eps: float, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        for name in ("q", "k", "v", "o"):
            setattr(self, name, operations.Linear(dim, dim, **place))
        self.norm_q: nn.Module = WanRMSNorm(dim, eps, **place) if qk_norm else nn.Identity()
        self.norm_k: nn.Module = WanRMSNorm(dim, eps, **place) if qk_norm else nn.Identity()

    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module

    def forward(
        self, x: Tensor, freqs: Tensor, transformer_options: Options | None = None
    ) -> Tensor:
        """``x [B, L, D]`` at rotations ``freqs [B, L, 1, D / heads / 2, 2, 2]``."""
        heads = (self.num_heads, -1)
        q = apply_rope1(self.norm_q(self.q(x)).unflatten(-1, heads), freqs)
        k = apply_rope1(self.norm_k(self.k(x)).unflatten(-1, heads), freqs)
        out = attention.optimized_attention(
            q.flatten(2), k.flatten(2), self.v(x), self.num_heads,
            transformer_options=transformer_options,
        )  # fmt: skip
        return self.o(patches.attention_output(out, transformer_options, self.num_heads, None))


class WanT2VCrossAttention(WanSelfAttention):
    """Attention of patches with text."""

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        context: Tensor,
        image_length: int | None = None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        """``x [B, L, D]`` with ``context [B, Lc, D]``."""
        del image_length  # of the form with pictures
        q = self.norm_q(self.q(x))
        return self._leave(self._attend(q, context, transformer_options), transformer_options)

    def _attend(self, q: Tensor, context: Tensor, options: Options | None) -> Tensor:
        k, v = self.norm_k(self.k(context)), self.v(context)
        return attention.optimized_attention(q, k, v, self.num_heads, transformer_options=options)

    def _leave(self, seen: Tensor, options: Options | None) -> Tensor:
        """The projection of what was seen, after the patches of custom nodes."""
        name = patches.CROSS_OUTPUT
        return self.o(patches.attention_output(seen, options, self.num_heads, None, name))


class WanI2VCrossAttention(WanT2VCrossAttention):
    """The same, and beside it attention with the tokens of a picture, which stand before the
    text.
    """

    def __init__(
        self, dim: int, num_heads: int, qk_norm: bool, eps: float, operations: Any, **place: Any
    ) -> None:
        super().__init__(dim, num_heads, qk_norm, eps, operations, **place)
        self.k_img = operations.Linear(dim, dim, **place)
        self.v_img = operations.Linear(dim, dim, **place)
        self.norm_k_img: nn.Module = WanRMSNorm(dim, eps, **place) if qk_norm else nn.Identity()

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        context: Tensor,
        image_length: int | None = None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        """Without a picture (no ``image_length``) both parts attend to the text, as the incumbent
        has it.
        """
        image, text = context[:, :image_length], context[:, image_length:]
        q = self.norm_q(self.q(x))
        k, v = self.norm_k_img(self.k_img(image)), self.v_img(image)
        seen = attention.optimized_attention(
            q, k, v, self.num_heads, transformer_options=transformer_options
        )
        seen = seen + self._attend(q, text, transformer_options)
        return self._leave(seen, transformer_options)


def per_token(modulation: Tensor, x: Tensor) -> Tensor:
    """Modulation ``[B, F, D]`` of F stretches of time, for each token of ``x [B, L, D]``."""
    if modulation.shape[1] == 1:
        return modulation
    return modulation.repeat_interleave(x.shape[1] // modulation.shape[1], dim=1)


class WanAttentionBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward; the first and the last are modulated."""

    compiles_alone = True

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        num_heads: int,
        qk_norm: bool = True,
        cross_attn_norm: bool = False,
        eps: float = 1e-6,
        with_image: bool = False,
        operations: Any = ops.disable_weight_init,
        **place: Any,
    ) -> None:
        super().__init__()
        plain = {"eps": eps, "elementwise_affine": False, **place}
        self.norm1 = operations.LayerNorm(dim, **plain)
        self.self_attn = WanSelfAttention(dim, num_heads, qk_norm, eps, operations, **place)
        self.norm3: nn.Module = nn.Identity()
        if cross_attn_norm:
            self.norm3 = operations.LayerNorm(dim, eps=eps, elementwise_affine=True, **place)
        kind = WanI2VCrossAttention if with_image else WanT2VCrossAttention
        self.cross_attn = kind(dim, num_heads, qk_norm, eps, operations, **place)
        self.norm2 = operations.LayerNorm(dim, **plain)
        self.ffn = nn.Sequential(
            operations.Linear(dim, ffn_dim, **place),
            nn.GELU(approximate="tanh"),
            operations.Linear(ffn_dim, dim, **place),
        )
        self.modulation = nn.Parameter(torch.empty(1, 6, dim, **place))

    def forward(
        self,
        x: Tensor,
        e: Tensor,
        freqs: Tensor,
        context: Tensor,
        context_img_len: int | None = None,
        transformer_options: Options | None = None,
        **beside: Any,
    ) -> Tensor:
        """One layer over ``x [B, L, D]``.

        Args:
            e: What time makes of the modulation ``[B, F, 6, D]``, for F stretches of time.
            freqs: Rotations of positions.
            context: Text tokens, behind ``context_img_len`` tokens of a picture.
            **beside: What blocks of other kinds see.
        """
        mods = [per_token(part, x) for part in (self.modulation[:, None].to(e) + e).unbind(2)]
        options = transformer_options
        y = torch.addcmul(mods[0], self.norm1(x), 1 + mods[1])
        x = torch.addcmul(x, self.self_attn(y, freqs, options), mods[2])
        x = self.see(x, context, context_img_len, options, **beside)
        y = torch.addcmul(mods[3], self.norm2(x), 1 + mods[4])
        return torch.addcmul(x, self.ffn(y), mods[5])

    def see(
        self, x: Tensor, context: Tensor, image_length: int | None, options: Options | None
    ) -> Tensor:
        """Patches after they saw the context."""
        return x + self.cross_attn(self.norm3(x), context, image_length, options)


class VaceWanAttentionBlock(WanAttentionBlock):
    """A block over a control video; it gives what is added to the main stream, too."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        num_heads: int,
        is_first: bool,
        operations: Any,
        **options: Any,
    ) -> None:
        super().__init__(dim, ffn_dim, num_heads, operations=operations, **options)
        place = {name: options[name] for name in ("dtype", "device")}
        self.before_proj: nn.Module | None = None
        if is_first:
            self.before_proj = operations.Linear(dim, dim, **place)
        self.after_proj = operations.Linear(dim, dim, **place)

    def forward(self, c: Tensor, x: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """``c`` is the control stream, ``x`` the main stream before its first block; gives the
        residual and the new control stream.
        """
        if self.before_proj is not None:
            c = self.before_proj(c) + x
        c = super().forward(c, **kwargs)
        return self.after_proj(c), c


class Head(nn.Module):
    """A modulated norm and a projection to patches."""

    def __init__(self, dim: int, out_width: int, eps: float, operations: Any, **place: Any) -> None:
        super().__init__()
        self.norm = operations.LayerNorm(dim, eps=eps, elementwise_affine=False, **place)
        self.head = operations.Linear(dim, out_width, **place)
        self.modulation = nn.Parameter(torch.empty(1, 2, dim, **place))

    def forward(self, x: Tensor, e: Tensor) -> Tensor:
        """``x [B, L, D]``, time embedding ``e [B, F, D]``."""
        shift, scale = (self.modulation[:, None].to(e) + e[:, :, None]).unbind(2)
        return self.head(torch.addcmul(per_token(shift, x), self.norm(x), 1 + per_token(scale, x)))


class MLPProj(nn.Module):
    """Tokens of an image encoder as tokens of the context."""

    def __init__(
        self, in_dim: int, out_dim: int, positions: int | None, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.proj = nn.Sequential(
            operations.LayerNorm(in_dim, eps=NORM_EPS, **place),
            operations.Linear(in_dim, in_dim, **place),
            nn.GELU(),
            operations.Linear(in_dim, out_dim, **place),
            operations.LayerNorm(out_dim, eps=NORM_EPS, **place),
        )
        self.emb_pos: nn.Parameter | None = None
        if positions is not None:  # first and last frame, one after the other
            self.emb_pos = nn.Parameter(torch.empty(1, positions, in_dim, **place))

    def forward(self, image_embeds: Tensor) -> Tensor:
        if self.emb_pos is not None:
            length = self.emb_pos.shape[1]
            image_embeds = image_embeds[:, :length]
            image_embeds = image_embeds + self.emb_pos[:, : image_embeds.shape[1]].to(image_embeds)
        return self.proj(image_embeds)


class CameraResidualBlock(nn.Module):
    """Two convolutions around a residual connection."""

    def __init__(self, dim: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.conv1 = operations.Conv2d(dim, dim, 3, padding=1, **place)
        self.conv2 = operations.Conv2d(dim, dim, 3, padding=1, **place)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(functional.relu(self.conv1(x)))


class CameraAdapter(nn.Module):
    """The rays of a camera, in pixels, as what is added to the patches."""

    def __init__(
        self, in_dim: int, dim: int, patch: Sequence[int], operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.conv = operations.Conv2d(
            in_dim * PIXELS_PER_CELL**2, dim, tuple(patch), stride=tuple(patch), **place
        )
        self.residual_blocks = nn.Sequential(CameraResidualBlock(dim, operations, **place))

    def forward(self, rays: Tensor) -> Tensor:
        """``[B, C, F, 8 H, 8 W]`` to ``[B, D, F, H / p, W / p]``."""
        frames = rays.transpose(1, 2)
        cells = functional.pixel_unshuffle(frames.flatten(0, 1), PIXELS_PER_CELL)
        made = self.residual_blocks(self.conv(cells))
        return made.unflatten(0, frames.shape[:2]).transpose(1, 2)
