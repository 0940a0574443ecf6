"""The transformer of Stable Audio: a token for each latent of the sound, text by cross-attention.

The time and the length that is asked for stand as one token before those of the sound.
Custom nodes reach in through ``transformer_options``: ``patches_replace["dit"]`` with keys
``("double_block", i)``, whose ``img`` is that token and those of the sound and ``txt`` the text,
``patches["attn1_output_patch"]`` and ``patches["attn2_output_patch"]``.
Source: https://arxiv.org/abs/2407.14358; https://github.com/Stability-AI/stable-audio-tools.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.nn import attention, patches
from comfy.nn.wrappers import run_wrapped

TIME_WAVES = 256
FEWEST_ROTATED = 32  # channels of a head that turn with the position, or half of them all
NORM_EPS = 1e-5
FEED_FORWARD = 4  # times the width
Options = dict[str, Any]


class FourierFeatures(nn.Module):
    """Learned waves of a number."""

    def __init__(self, out: int, **place: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out // 2, 1, **place))

    def forward(self, x: Tensor) -> Tensor:
        """``[B]`` to ``[B, out]``."""
        angles = 2 * math.pi * x[:, None] @ self.weight.to(x).T
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


class LayerNorm(nn.Module):
    """A layer norm with a weight and no bias."""

    def __init__(self, width: int, **place: Any) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width, **place))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gamma.to(x)
        return functional.layer_norm(x, x.shape[-1:], weight, eps=NORM_EPS)


class RotaryEmbedding(nn.Module):
    """Angles of positions; the first and second half of the channels turn as pairs."""

    inv_freq: Tensor

    def __init__(self, channels: int, device: Any = None) -> None:
        super().__init__()
        frequencies = torch.empty(channels // 2, dtype=torch.float32, device=device)
        self.register_buffer("inv_freq", frequencies)

    def forward(self, length: int, like: Tensor) -> Tensor:
        """Angles ``[L, channels]``, float32."""
        places = torch.arange(length, device=like.device, dtype=torch.float32)
        frequencies = self.inv_freq.to(like.device, torch.float32)
        return torch.outer(places, frequencies).repeat(1, 2)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Turn the first channels of ``x [B, heads, L, D]`` by ``angles [L, channels]``."""
    channels = angles.shape[-1]
    turned, rest = x[..., :channels].float(), x[..., channels:]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat([-second, first], dim=-1)
    turned = turned * angles.cos() + swapped * angles.sin()
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


class Attention(nn.Module):
    """Attention of the sound with itself or, given the text's width, with the text."""

    def __init__(
        self, dim: int, head: int, context: int | None, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.heads, self.groups = dim // head, (context or dim) // head
        self.head, self.is_cross = head, context is not None
        if context is None:
            self.to_qkv = operations.Linear(dim, 3 * dim, bias=False, **place)
        else:
            self.to_q = operations.Linear(dim, dim, bias=False, **place)
            self.to_kv = operations.Linear(context, 2 * context, bias=False, **place)
        self.to_out = operations.Linear(dim, dim, bias=False, **place)

    def forward(
        self, x: Tensor, context: Tensor | None, angles: Tensor | None, options: Options
    ) -> Tensor:
        if self.is_cross:
            q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, dim=-1)
        else:
            q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (q, k, v))
        if angles is not None:
            q, k = turn(q, angles), turn(k, angles)
        if self.groups != self.heads:
            shared = self.heads // self.groups
            k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        seen = attention.optimized_attention(
            q, k, v, self.heads, skip_reshape=True, transformer_options=options
        )
        name = patches.CROSS_OUTPUT if self.is_cross else patches.OUTPUT
        return self.to_out(patches.attention_output(seen, options, self.heads, None, name))


class GLU(nn.Module):
    """A projection, and a gate of the same size."""

    def __init__(self, dim: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.proj = operations.Linear(dim, 2 * inner, **place)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * functional.silu(gate)


class FeedForward(nn.Module):
    """Feed-forward with a gate, under the published keys."""

    def __init__(self, dim: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        out = operations.Linear(inner, dim, **place)
        self.ff = nn.Sequential(GLU(dim, inner, operations, **place), nn.Identity(), out)

    def forward(self, x: Tensor) -> Tensor:
        return self.ff(x)


class TransformerBlock(nn.Module):
    """A layer: the sound with itself, with the text, and alone."""

    compiles_alone = True

    def __init__(
        self, dim: int, head: int, context: int, inner: int, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.pre_norm = LayerNorm(dim, **place)
        self.self_attn = Attention(dim, head, None, operations, **place)
        self.cross_attend_norm = LayerNorm(dim, **place)
        self.cross_attn = Attention(dim, head, context, operations, **place)
        self.ff_norm = LayerNorm(dim, **place)
        self.ff = FeedForward(dim, inner, operations, **place)

    def forward(
        self, x: Tensor, context: Tensor, angles: Tensor, transformer_options: Options
    ) -> Tensor:
        x = x + self.self_attn(self.pre_norm(x), None, angles, transformer_options)
        crossed = self.cross_attend_norm(x)
        x = x + self.cross_attn(crossed, context, None, transformer_options)
        return x + self.ff(self.ff_norm(x))


class ContinuousTransformer(nn.Module):
    """All layers, between projections from and to latents."""

    def __init__(
        self,
        channels: int,
        dim: int,
        head: int,
        context: int,
        depth: int,
        inner: int,
        operations: Any,
        **place: Any,
    ) -> None:
        super().__init__()
        rotated = min(head, max(head // 2, FEWEST_ROTATED))
        self.project_in = operations.Linear(channels, dim, bias=False, **place)
        self.project_out = operations.Linear(dim, channels, bias=False, **place)
        self.rotary_pos_emb = RotaryEmbedding(rotated, place.get("device"))
        self.layers = nn.ModuleList(
            TransformerBlock(dim, head, context, inner, operations, **place) for _ in range(depth)
        )

    def forward(self, x: Tensor, first: Tensor, context: Tensor, options: Options) -> Tensor:
        """Sound ``[B, L, C]`` after one token ``first [B, 1, D]``."""
        x = torch.cat([first, self.project_in(x)], dim=1)
        angles = self.rotary_pos_emb(x.shape[1], x)
        table = (options.get("patches_replace") or {}).get("dit") or {}
        options["total_blocks"], options["block_type"] = len(self.layers), "double"
        for number, layer in enumerate(self.layers):
            options["block_index"] = number

            def original(args: Mapping[str, Any], layer: nn.Module = layer) -> Options:
                told = args.get("transformer_options") or {}
                return {"img": layer(args["img"], args["txt"], args["pe"], told)}

            args = {"img": x, "txt": context, "vec": first, "pe": angles}
            args["transformer_options"] = options
            replacement = table.get(("double_block", number))
            if replacement is None:
                x = original(args)["img"]
            else:
                x = replacement(args, {"original_block": original})["img"]
        return self.project_out(x[:, first.shape[1] :])


class AudioDiffusionTransformer(nn.Module):
    """Predicts the velocity of a noisy latent of sound from a time, text tokens and the length.

    Args:
        io_channels: Of a latent.
        embed_dim: Width of the tokens.
        cond_token_dim: Width of the text tokens and of the numbers among them.
        global_cond_dim: Width of what is told of the whole sound.
    """

    reads_patches = frozenset({"dit", patches.OUTPUT, patches.CROSS_OUTPUT})

    def __init__(
        self,
        io_channels: int = 64,
        embed_dim: int = 1536,
        cond_token_dim: int = 768,
        global_cond_dim: int = 1536,
        depth: int = 24,
        num_heads: int = 24,
        ff_dim: int | None = None,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        head = embed_dim // num_heads
        if embed_dim % num_heads or cond_token_dim % head or embed_dim % cond_token_dim:
            raise ValueError(
                f"tokens of {embed_dim} channels in {num_heads} heads beside a text of "
                f"{cond_token_dim}: heads must divide both, and the text's width that of the tokens"
            )
        place = {"dtype": dtype, "device": device}
        self.dtype = dtype

        def two(width: int, out: int, bias: bool) -> nn.Sequential:
            first = operations.Linear(width, out, bias=bias, **place)
            return nn.Sequential(first, nn.SiLU(), operations.Linear(out, out, bias=bias, **place))

        self.timestep_features = FourierFeatures(TIME_WAVES, **place)
        self.to_timestep_embed = two(TIME_WAVES, embed_dim, True)
        self.to_cond_embed = two(cond_token_dim, cond_token_dim, False)
        self.to_global_embed = two(global_cond_dim, embed_dim, False)
        self.preprocess_conv = operations.Conv1d(io_channels, io_channels, 1, bias=False, **place)
        self.postprocess_conv = operations.Conv1d(io_channels, io_channels, 1, bias=False, **place)
        self.transformer = ContinuousTransformer(
            io_channels, embed_dim, head, cond_token_dim, depth,
            ff_dim or FEED_FORWARD * embed_dim, operations, **place,
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        global_embed: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, L]``.
            timestep: Times ``[B]`` in 0..1.
            context: Text tokens ``[B, T, D]``, those of numbers among them.
            global_embed: What is told of the whole sound ``[B, G]``.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timestep, context, global_embed, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        global_embed: Tensor | None = None,
        transformer_options: Options | None = None,
        **_: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        tokens = self.to_cond_embed(context)
        waves = self.timestep_features(timestep.float())
        first = self.to_timestep_embed(waves.to(x.dtype))
        if global_embed is not None:
            first = first + self.to_global_embed(global_embed)
        x = x + self.preprocess_conv(x)
        out = self.transformer(x.transpose(1, 2), first[:, None], tokens, options)
        out = out.transpose(1, 2)
        return out + self.postprocess_conv(out)
