"""Kandinsky 5: layers over the text alone, then layers over a video that look at it.

Custom nodes reach in through ``transformer_options``: ``patches["attn1_output_patch"]`` and
``patches["attn2_output_patch"]`` see the attention of the video with itself and with the text,
``patches_replace["dit"]`` has keys ``("double_block", i)``, whose ``img`` is the video and ``txt``
the text.
Source: https://arxiv.org/abs/2511.14993; https://github.com/kandinskylab/kandinsky-5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.common_dit import RMSNorm, pad_to_patch_size
from comfy.ldm.flux.math import apply_rope1, rope
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

NORM_EPS, HEAD_EPS = 1e-5, 1e-5
THETA = 10000.0
Options = dict[str, Any]


class Attention(nn.Module):
    """Attention of tokens with themselves or with others."""

    def __init__(self, width: int, head: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.heads = width // head
        self.to_query, self.to_key, self.to_value, self.out_layer = (
            operations.Linear(width, width, **place) for _ in range(4)
        )
        self.query_norm, self.key_norm = (RMSNorm(head, HEAD_EPS, **place) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        others: Tensor,
        freqs: Tensor | None,
        options: Options,
        name: str | None,
    ) -> Tensor:
        """``x [B, L, D]`` with ``others [B, M, D]``.

        Args:
            freqs: Rotations of both, where they are the same.
            name: Of the patches that see it; None for none.
        """
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.to_query(x), self.to_key(others), self.to_value(others))
        )
        q, k = self.query_norm(q), self.key_norm(k)
        if freqs is not None:
            q, k = apply_rope1(q, freqs), apply_rope1(k, freqs)
        seen = attention.optimized_attention(
            q, k, v, self.heads, skip_reshape=True, transformer_options=options
        )
        if name is not None:
            seen = patches.attention_output(seen, options, self.heads, None, name)
        return self.out_layer(seen)


class FeedForward(nn.Module):
    """Two linear layers with GELU between them."""

    def __init__(self, width: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.in_layer = operations.Linear(width, inner, bias=False, **place)
        self.out_layer = operations.Linear(inner, width, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(functional.gelu(self.in_layer(x)))


class Modulation(nn.Module):
    """From the time to shift, scale and gate of each part of a layer."""

    def __init__(
        self, time_width: int, width: int, parts: int, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.parts = parts
        self.out_layer = operations.Linear(time_width, parts * width, **place)

    def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
        changes = self.out_layer(functional.silu(vec))[:, None]
        return changes.chunk(self.parts, dim=-1)


class TransformerBlock(nn.Module):
    """A layer; that over the video also looks at the text."""

    compiles_alone = True
    visual_modulation: nn.Module
    text_modulation: nn.Module

    def __init__(
        self,
        width: int,
        time_width: int,
        inner: int,
        head: int,
        is_visual: bool,
        operations: Any,
        **place: Any,
    ) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.is_visual = is_visual
        parts = 9 if is_visual else 6
        made = Modulation(time_width, width, parts, operations, **place)
        setattr(self, "visual_modulation" if is_visual else "text_modulation", made)
        self.self_attention_norm = operations.LayerNorm(width, **norm)
        self.self_attention = Attention(width, head, operations, **place)
        if is_visual:
            self.cross_attention_norm = operations.LayerNorm(width, **norm)
            self.cross_attention = Attention(width, head, operations, **place)
        self.feed_forward_norm = operations.LayerNorm(width, **norm)
        self.feed_forward = FeedForward(width, inner, operations, **place)

    def forward(
        self,
        x: Tensor,
        vec: Tensor,
        freqs: Tensor,
        text: Tensor | None = None,
        transformer_options: Options | None = None,
    ) -> Tensor:
        """``x [B, L, D]`` at rotations ``freqs``; ``text [B, M, D]`` for layers over the video."""
        options = transformer_options or {}
        changes = self.visual_modulation(vec) if self.is_visual else self.text_modulation(vec)
        shift, scale, gate = changes[:3]
        normed = self.self_attention_norm(x) * (1 + scale) + shift
        name = patches.OUTPUT if self.is_visual else None
        x = x + gate * self.self_attention(normed, normed, freqs, options, name)
        if text is not None and self.is_visual:
            shift, scale, gate = changes[3:6]
            normed = self.cross_attention_norm(x) * (1 + scale) + shift
            seen = self.cross_attention(normed, text, None, options, patches.CROSS_OUTPUT)
            x = x + gate * seen
        shift, scale, gate = changes[-3:]
        normed = self.feed_forward_norm(x) * (1 + scale) + shift
        return x + gate * self.feed_forward(normed)


class TimeEmbeddings(nn.Module):
    """A time as a vector."""

    def __init__(self, waves: int, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.waves = waves
        self.in_layer = operations.Linear(waves, width, **place)
        self.out_layer = operations.Linear(width, width, **place)

    def forward(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        waves = timestep_embedding(t, self.waves).to(dtype)
        return self.out_layer(functional.silu(self.in_layer(waves)))


class TextEmbeddings(nn.Module):
    """Text at another width."""

    def __init__(self, text_width: int, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.in_layer = operations.Linear(text_width, width, **place)
        self.norm = operations.LayerNorm(width, elementwise_affine=True, eps=NORM_EPS, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.in_layer(x))


class VisualEmbeddings(nn.Module):
    """Cells of a video as tokens."""

    def __init__(self, cell: int, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.in_layer = operations.Linear(cell, width, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.in_layer(x)


class OutLayer(nn.Module):
    """A modulated norm and a projection to cells."""

    def __init__(
        self, width: int, time_width: int, out: int, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        norm = {"elementwise_affine": False, "eps": NORM_EPS, **place}
        self.modulation = Modulation(time_width, width, 2, operations, **place)
        self.norm = operations.LayerNorm(width, **norm)
        self.out_layer = operations.Linear(width, out, **place)

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.modulation(vec)
        return self.out_layer(self.norm(x) * (1 + scale) + shift)


class Kandinsky5(nn.Module):
    """Predicts the flow of a noisy video (or picture) from a time 0..1000, text tokens and pooled
    text.

    Args:
        in_text_dim, in_text_dim2: Widths of the text tokens and of the pooled text.
        time_dim: Width of the time's vector.
        visual_embed_dim: Channels of a cell that the network takes, those beside the latent among
            them.
        axes_dims: Channels of a head for frame, row and column.
        rope_scale_factor: By how much positions of each axis are closer than whole numbers.
    """

    reads_patches = frozenset({"dit", patches.OUTPUT, patches.CROSS_OUTPUT})

    def __init__(
        self,
        out_visual_dim: int = 16,
        in_text_dim: int = 3584,
        in_text_dim2: int = 768,
        time_dim: int = 512,
        model_dim: int = 1792,
        ff_dim: int = 7168,
        visual_embed_dim: int = 132,
        patch_size: Sequence[int] = (1, 2, 2),
        num_text_blocks: int = 2,
        num_visual_blocks: int = 32,
        axes_dims: Sequence[int] = (16, 24, 24),
        rope_scale_factor: Sequence[float] = (1.0, 2.0, 2.0),
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        head = sum(axes_dims)
        if model_dim % head:
            raise ValueError(f"{model_dim} channels, which heads of {head} channels do not divide")
        parts = {"operations": operations, "dtype": dtype, "device": device}
        self.dtype, self.patch = dtype, tuple(patch_size)
        self.axes_dims, self.scales, self.head = axes_dims, rope_scale_factor, head
        sizes = (model_dim, time_dim, ff_dim, head)
        self.time_embeddings = TimeEmbeddings(model_dim, time_dim, **parts)
        self.text_embeddings = TextEmbeddings(in_text_dim, model_dim, **parts)
        self.pooled_text_embeddings = TextEmbeddings(in_text_dim2, time_dim, **parts)
        self.visual_embeddings = VisualEmbeddings(visual_embed_dim, model_dim, **parts)
        self.text_transformer_blocks = nn.ModuleList(
            TransformerBlock(*sizes, False, **parts) for _ in range(num_text_blocks)
        )
        self.visual_transformer_blocks = nn.ModuleList(
            TransformerBlock(*sizes, True, **parts) for _ in range(num_visual_blocks)
        )
        cell = self.patch[0] * self.patch[1] * self.patch[2]
        self.out_layer = OutLayer(model_dim, time_dim, cell * out_visual_dim, **parts)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        time_dim_replace: Tensor | None = None,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, T, H, W]``, or of a picture ``[B, C, H, W]``, with the channels
                beside it.
            timestep: Times ``[B]`` in 0..1000.
            context: Text tokens ``[B, L, D]``.
            y: Pooled text ``[B, P]``.
            time_dim_replace: First frames ``[B, C, T, H, W]`` that stand in place of the latent's.
        """
        options = {} if transformer_options is None else transformer_options
        return run_wrapped(
            self._forward, self, "diffusion_model", options,
            x, timestep, context, y, time_dim_replace, options, **kwargs,
        )  # fmt: skip

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        y: Tensor | None = None,
        time_dim_replace: Tensor | None = None,
        transformer_options: Options | None = None,
        **_: Any,
    ) -> Tensor:
        options = {} if transformer_options is None else transformer_options
        is_picture = x.ndim == 4
        x = x[:, :, None] if is_picture else x
        shown = x.shape[2:]
        if time_dim_replace is not None:
            given = time_dim_replace[:, :, : shown[0]].to(x)
            x = x.clone()
            x[:, : given.shape[1], : given.shape[2]] = given
        x = pad_to_patch_size(x, self.patch)
        sizes = [size // patch for size, patch in zip(x.shape[2:], self.patch)]
        r, p, q = self.patch
        cells = rearrange(x, "b c (t r) (h p) (w q) -> b (t h w) (r p q c)", r=r, p=p, q=q)
        vec = self.time_embeddings(timestep, x.dtype)
        if y is not None:
            vec = vec + self.pooled_text_embeddings(y)
        text = self.text_embeddings(context)
        freqs = self._text_positions(text)
        for block in self.text_transformer_blocks:
            text = block(text, vec, freqs, None, options)
        tokens = self._run_blocks(self.visual_embeddings(cells), vec, sizes, text, options)
        out = rearrange(
            self.out_layer(tokens, vec),
            "b (t h w) (c r p q) -> b c (t r) (h p) (w q)",
            t=sizes[0], h=sizes[1], r=r, p=p, q=q,
        )  # fmt: skip
        out = out[:, :, : shown[0], : shown[1], : shown[2]]
        return out[:, :, 0] if is_picture else out

    def _text_positions(self, text: Tensor) -> Tensor:
        """Rotations ``[1, 1, L, head / 2, 2, 2]`` of the text's tokens."""
        places = torch.arange(text.shape[1], device=text.device, dtype=torch.float32)
        return rope(places[None], self.head, THETA)[:, None]

    def _positions(self, sizes: Sequence[int], device: Any) -> Tensor:
        """Rotations of the video's cells."""
        parts = []
        for axis, (channels, scale) in enumerate(zip(self.axes_dims, self.scales)):
            places = torch.arange(sizes[axis], device=device, dtype=torch.float32) / scale
            shape = [1, 1, 1]
            shape[axis] = sizes[axis]
            spread = places.view(shape).expand(*sizes).reshape(1, -1)
            parts.append(rope(spread, channels, THETA))
        return torch.cat(parts, dim=-3)[:, None]

    def _run_blocks(
        self, tokens: Tensor, vec: Tensor, sizes: Sequence[int], text: Tensor, options: Options
    ) -> Tensor:
        freqs = self._positions(sizes, tokens.device)
        table = (options.get("patches_replace") or {}).get("dit") or {}
        count = len(self.visual_transformer_blocks)
        options["total_blocks"], options["block_type"] = count, "double"
        for number, block in enumerate(self.visual_transformer_blocks):
            options["block_index"] = number

            def original(args: Mapping[str, Any], block: nn.Module = block) -> Options:
                told = args.get("transformer_options")
                return {"img": block(args["img"], args["vec"], args["pe"], args["txt"], told)}

            args = {"img": tokens, "txt": text, "vec": vec, "pe": freqs}
            args["transformer_options"] = options  # type: ignore[assignment]
            replacement = table.get(("double_block", number))
            if replacement is None:
                tokens = original(args)["img"]
            else:
                tokens = replacement(args, {"original_block": original})["img"]
        return tokens
