"""Transformers over the positions of a feature map, with the hooks that custom nodes patch.

Patches live in ``transformer_options``: ``patches`` maps a name (``attn1_patch``,
``attn1_output_patch``, ``middle_patch``, ``attn2_patch``, ``attn2_output_patch``) to a list of
callables, ``patches_replace`` maps ``attn1`` and ``attn2`` to ``{block: callable}`` where block is
``(name, number)`` or ``(name, number, layer)``. What a patch is told is all of
``transformer_options`` but these tables, plus ``n_heads``, ``dim_head`` and ``attn_precision``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling as compiling
from torch.nn import functional as F

from comfy import ops
from comfy.nn import attention
from comfy.nn.layout import features_of, tokens_of
from comfy.nn.patches import told

Options = dict[str, Any]
MANY = 1 << 17
"""Elements of an item from which a copy costs more than a call."""


class GEGLU(nn.Module):
    """Gated linear unit: ``a * gelu(b)`` of two linear maps a, b of x."""

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.proj = operations.Linear(dim_in, dim_out * 2, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        if not compiling() and x[:1].numel() >= MANY and ops.is_plain_linear(self.proj):
            # Two results of half the width: neither is copied, and one takes the product.
            value, gate = ops.linear_parts(self.proj, x, 2)
            return value.mul_(F.gelu(gate))
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.gelu(gate)


class FeedForward(nn.Module):
    """Two linear layers with a (gated) GELU between them; the hidden width is ``dim * mult``."""

    def __init__(
        self,
        dim: int,
        dim_out: int | None = None,
        mult: int = 4,
        glu: bool = False,
        dropout: float = 0.0,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        inner = int(dim * mult)
        place = {"dtype": dtype, "device": device}
        if glu:
            first: nn.Module = GEGLU(dim, inner, operations=operations, **place)
        else:
            first = nn.Sequential(operations.Linear(dim, inner, **place), nn.GELU())
        self.net = nn.Sequential(
            first, nn.Dropout(dropout), operations.Linear(inner, dim_out or dim, **place)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class CrossAttention(nn.Module):
    """Multi-head attention of x over a context (over itself when there is none)."""

    def __init__(
        self,
        query_dim: int,
        context_dim: int | None = None,
        heads: int = 8,
        dim_head: int = 64,
        dropout: float = 0.0,
        attn_precision: torch.dtype | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        inner = heads * dim_head
        context_dim = query_dim if context_dim is None else context_dim
        self.heads, self.dim_head, self.attn_precision = heads, dim_head, attn_precision
        place = {"dtype": dtype, "device": device}
        self.to_q = operations.Linear(query_dim, inner, bias=False, **place)
        self.to_k = operations.Linear(context_dim, inner, bias=False, **place)
        self.to_v = operations.Linear(context_dim, inner, bias=False, **place)
        self.to_out = nn.Sequential(
            operations.Linear(inner, query_dim, **place), nn.Dropout(dropout)
        )

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        value: Tensor | None = None,
        mask: Tensor | None = None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        """Attend from x ``[B, L, D]`` to ``context [B, Lc, Dc]``; ``value`` replaces it for the
        values."""
        context = x if context is None else context
        q, k = self.to_q(x), self.to_k(context)
        v = self.to_v(context if value is None else value)
        options: dict[str, Any] = {
            "attn_precision": self.attn_precision,
            "transformer_options": transformer_options,
        }
        if mask is None:
            out = attention.optimized_attention(q, k, v, self.heads, **options)
        else:
            out = attention.optimized_attention_masked(q, k, v, self.heads, mask, **options)
        return self.to_out(out)


class BasicTransformerBlock(nn.Module):
    """Self-attention, cross-attention and feed-forward, each normalised before and added after."""

    compiles_alone = True

    def __init__(
        self,
        dim: int,
        n_heads: int,
        d_head: int,
        dropout: float = 0.0,
        context_dim: int | None = None,
        gated_ff: bool = True,
        checkpoint: bool = True,
        ff_in: bool = False,
        inner_dim: int | None = None,
        disable_self_attn: bool = False,
        disable_temporal_crossattention: bool = False,
        switch_temporal_ca_to_sa: bool = False,
        attn_precision: torch.dtype | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        del checkpoint  # a training option
        super().__init__()
        place = {"dtype": dtype, "device": device}
        parts = {"operations": operations, **place}
        self.ff_in: nn.Module | None = None
        if ff_in or inner_dim is not None:
            self.norm_in = operations.LayerNorm(dim, **place)
            self.ff_in = FeedForward(dim, inner_dim, glu=gated_ff, dropout=dropout, **parts)
        inner = dim if inner_dim is None else inner_dim
        self.is_res = inner == dim
        self.disable_self_attn = disable_self_attn
        self.switch_temporal_ca_to_sa = switch_temporal_ca_to_sa
        self.n_heads, self.d_head, self.attn_precision = n_heads, d_head, attn_precision

        def attend(context: int | None) -> CrossAttention:
            return CrossAttention(inner, context, n_heads, d_head, dropout, attn_precision, **parts)

        self.attn1 = attend(context_dim if disable_self_attn else None)
        self.ff = FeedForward(inner, dim, glu=gated_ff, dropout=dropout, **parts)
        self.attn2: CrossAttention | None = None
        if not disable_temporal_crossattention:
            self.attn2 = attend(None if switch_temporal_ca_to_sa else context_dim)
            self.norm2 = operations.LayerNorm(inner, **place)
        self.norm1 = operations.LayerNorm(inner, **place)
        self.norm3 = operations.LayerNorm(inner, **place)

    def forward(
        self, x: Tensor, context: Tensor | None = None, transformer_options: Options | None = None
    ) -> Tensor:
        """One layer over ``x [B, L, D]`` with ``context [B, Lc, Dc]``."""
        options = {} if transformer_options is None else transformer_options
        hooks = _Hooks(options, self.n_heads, self.d_head, self.attn_precision)
        if self.ff_in is not None:
            inner = self.ff_in(self.norm_in(x))
            x = inner + x if self.is_res else inner
        own_context = context if self.disable_self_attn else None
        x = x + hooks.attend(self.attn1, "attn1", self.norm1(x), own_context)
        x = hooks.apply("middle_patch", x)
        if self.attn2 is not None:
            normed = self.norm2(x)
            other = normed if self.switch_temporal_ca_to_sa else context
            x = x + hooks.attend(self.attn2, "attn2", normed, other)
        out = self.ff(self.norm3(x))
        return out + x if self.is_res else out


class _Hooks:
    """The patches of one forward pass, with what they are told."""

    def __init__(
        self, options: Options, n_heads: int, dim_head: int, precision: torch.dtype | None
    ) -> None:
        self.options = options
        self.patches: dict[str, list[Callable[..., Any]]] = options.get("patches") or {}
        self.replace: dict[str, dict[Any, Callable[..., Tensor]]] = (
            options.get("patches_replace") or {}
        )
        if self.patches or self.replace:
            self.told = told(options, n_heads=n_heads, dim_head=dim_head, attn_precision=precision)

    def apply(self, name: str, x: Tensor) -> Tensor:
        """Run the patches of one name over x in turn."""
        for patch in self.patches.get(name, ()):
            x = patch(x, self.told)
        return x

    def attend(self, layer: CrossAttention, name: str, x: Tensor, context: Tensor | None) -> Tensor:
        """One attention with its input patches, its replacement and its output patches."""
        value: Tensor | None = None
        if f"{name}_patch" in self.patches:
            context = x if context is None else context
            value = context
            for patch in self.patches[f"{name}_patch"]:
                x, context, value = patch(x, context, value, self.told)
        replacement = self._replacement(name)
        if replacement is None:
            out = layer(x, context=context, value=value, transformer_options=self.options)
        else:
            context = x if context is None else context
            q, k = layer.to_q(x), layer.to_k(context)
            v = layer.to_v(context if value is None else value)
            out = layer.to_out(replacement(q, k, v, self.told))
        return self.apply(f"{name}_output_patch", out)

    def _replacement(self, name: str) -> Callable[..., Tensor] | None:
        """The function that replaces this attention: the one for this very layer, else for the
        block."""
        table = self.replace.get(name)
        if not table:
            return None
        block = self.options.get("block")
        if block is None:
            return None
        layer = (block[0], block[1], self.options.get("block_index"))
        return table.get(layer) or table.get(block)


class SpatialTransformer(nn.Module):
    """Transformer layers over the positions of ``x [B, C, H, W]``, with a residual connection."""

    def __init__(
        self,
        in_channels: int,
        n_heads: int,
        d_head: int,
        depth: int = 1,
        dropout: float = 0.0,
        context_dim: int | Sequence[int] | None = None,
        disable_self_attn: bool = False,
        use_linear: bool = False,
        use_checkpoint: bool = True,
        attn_precision: torch.dtype | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        norm_num_groups: int = 32,
    ) -> None:
        del use_checkpoint  # a training option
        super().__init__()
        contexts: list[int | None] = (
            list(context_dim) if isinstance(context_dim, Sequence) else [context_dim] * depth
        )
        self.in_channels, self.use_linear = in_channels, use_linear
        inner = n_heads * d_head
        place = {"dtype": dtype, "device": device}
        self.norm = operations.GroupNorm(norm_num_groups, in_channels, eps=1e-6, **place)
        project = operations.Linear if use_linear else _pointwise(operations)
        self.proj_in = project(in_channels, inner, **place)
        self.transformer_blocks = nn.ModuleList(
            BasicTransformerBlock(
                inner,
                n_heads,
                d_head,
                dropout=dropout,
                context_dim=contexts[layer],
                disable_self_attn=disable_self_attn,
                attn_precision=attn_precision,
                operations=operations,
                **place,
            )
            for layer in range(depth)
        )
        self.proj_out = project(inner, in_channels, **place)

    def forward(
        self,
        x: Tensor,
        context: Tensor | Sequence[Tensor] | None = None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        contexts = (
            context
            if isinstance(context, (list, tuple))
            else [context] * len(self.transformer_blocks)
        )
        options["activations_shape"] = list(x.shape)
        height, width = x.shape[2:]
        h = self.norm(x)
        if not self.use_linear:
            h = self.proj_in(h)
        h = tokens_of(h)
        if self.use_linear:
            h = self.proj_in(h)
        for layer, block in enumerate(self.transformer_blocks):
            options["block_index"] = layer
            h = block(h, context=contexts[layer], transformer_options=options)
        if self.use_linear:
            h = self.proj_out(h)
        h = features_of(h, height, width)
        if not self.use_linear:
            h = self.proj_out(h)
        return h + x


def _pointwise(operations: Any) -> Callable[..., nn.Module]:
    """A maker of 1x1 convolutions with the arguments of a linear layer."""

    def make(channels: int, out_channels: int, **place: Any) -> nn.Module:
        return operations.Conv2d(channels, out_channels, kernel_size=1, **place)

    return make
