"""The transformer of ACE-Step: a token for each column of a latent of music.

A latent is a small picture of a spectrogram, ``[B, 8, 16, columns]``. Tokens attend to each other
linearly, and to text, lyrics and a voice by full attention.
Custom nodes reach in through ``transformer_options``: ``patches["attn1_output_patch"]`` and
``patches["attn2_output_patch"]``.
Source: Gong et al. 2025, https://arxiv.org/abs/2506.00045; Xie et al. 2024,
https://arxiv.org/abs/2410.10629, section 2.2, for the linear blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.ace.lyrics import LyricEncoder, LyricSizes
from comfy.ldm.common_dit import rms_norm
from comfy.nn import attention, patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

TIME_WAVES = 256
NORM_EPS, GROUP_EPS, DIVISION_EPS = 1e-6, 1e-6, 1e-15
GROUPS = 32
CONV_WIDTH = 256  # channels behind the first convolution for each of a latent's
Options = dict[str, Any]
Rotations = tuple[Tensor, Tensor]


def rotations(length: int, head: int, theta: float, like: Tensor) -> Rotations:
    """Cosines and sines ``[length, head]`` of every position.

    The frequencies stand twice one behind the other, while `turn` pairs neighbours: the two
    channels of a pair turn at different speeds. The published network was trained so.
    """
    steps = torch.arange(0, head, 2, device=like.device, dtype=torch.float32)
    places = torch.arange(length, device=like.device, dtype=torch.float32)
    angles = torch.outer(places, 1.0 / theta ** (steps / head)).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def turn(x: Tensor, by: Rotations) -> Tensor:
    """Turn pairs of neighbouring channels of ``x [B, heads, L, D]``."""
    first, second = x[..., 0::2], x[..., 1::2]
    swapped = torch.stack([-second, first], dim=-1).flatten(-2)
    return (x.float() * by[0] + swapped.float() * by[1]).to(x.dtype)


class Attention(nn.Module):
    """What both attentions have: projections and heads."""

    def __init__(self, width: int, heads: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = operations.Linear(width, width, **place)
        self.to_k = operations.Linear(width, width, **place)
        self.to_v = operations.Linear(width, width, **place)
        self.to_out = nn.Sequential(operations.Linear(width, width, **place))

    def by_head(self, x: Tensor) -> Tensor:
        """``[B, L, heads * D]`` to ``[B, heads, L, D]``."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class LinearAttention(Attention):
    """Attention among the tokens: not softmax but ReLU of queries and keys weighs the values."""

    def forward(self, x: Tensor, places: Rotations, options: Options) -> Tensor:
        q = turn(self.by_head(self.to_q(x)), places).relu().float()
        k = turn(self.by_head(self.to_k(x)), places).relu().float()
        v = self.by_head(self.to_v(x)).float()
        weighed = q @ (k.transpose(-2, -1) @ v)
        total = q @ k.sum(dim=-2, keepdim=True).transpose(-2, -1)
        seen = (weighed / (total + DIVISION_EPS)).to(x.dtype)
        seen = seen.transpose(1, 2).flatten(2)
        return self.to_out(patches.attention_output(seen, options, self.heads, None))


class CrossAttention(Attention):
    """Attention of the tokens to text, lyrics and voice, whose positions count too.

    Files hold further projections (``add_*``), of which the network makes no use.
    """

    def __init__(self, width: int, heads: int, operations: Any, **place: Any) -> None:
        super().__init__(width, heads, operations, **place)
        self.add_k_proj = operations.Linear(width, width, **place)
        self.add_v_proj = operations.Linear(width, width, **place)
        self.add_q_proj = operations.Linear(width, width, **place)
        self.to_add_out = operations.Linear(width, width, **place)

    def forward(
        self, x: Tensor, told: Tensor, places: Rotations, told_places: Rotations, options: Options
    ) -> Tensor:
        q = turn(self.by_head(self.to_q(x)), places)
        k = turn(self.by_head(self.to_k(told)), told_places)
        v = self.by_head(self.to_v(told))
        seen = attention.optimized_attention(
            q, k, v, self.heads, skip_reshape=True, transformer_options=options
        )
        name = patches.CROSS_OUTPUT
        return self.to_out(patches.attention_output(seen, options, self.heads, None, name))


class Convolution(nn.Module):
    """A convolution over a line, under the published key."""

    def __init__(
        self, width: int, out: int, kernel: int, operations: Any, is_each: bool, bias: bool,
        place: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        self.conv = operations.Conv1d(
            width, out, kernel, padding=kernel // 2, groups=width if is_each else 1, bias=bias,
            **place,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class FeedForward(nn.Module):
    """A feed-forward with a gate that sees the neighbours of a token."""

    def __init__(self, width: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        both = 2 * inner
        self.inverted_conv = Convolution(width, both, 1, operations, False, True, place)
        self.depth_conv = Convolution(both, both, 3, operations, True, True, place)
        self.point_conv = Convolution(inner, width, 1, operations, False, False, place)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.depth_conv(F.silu(self.inverted_conv(x.transpose(1, 2))))
        value, gate = wide.chunk(2, dim=1)
        return self.point_conv(value * F.silu(gate)).transpose(1, 2)


class TransformerBlock(nn.Module):
    """A layer: the tokens among each other, with what is told, and alone."""

    compiles_alone = True

    def __init__(self, width: int, heads: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.attn = LinearAttention(width, heads, operations, **place)
        self.cross_attn = CrossAttention(width, heads, operations, **place)
        self.ff = FeedForward(width, inner, operations, **place)
        self.scale_shift_table = nn.Parameter(torch.empty(6, width, **place))

    def forward(
        self,
        x: Tensor,
        told: Tensor,
        time: Tensor,
        places: Rotations,
        told_places: Rotations,
        options: Options,
    ) -> Tensor:
        """Tokens ``[B, L, D]``, what is told ``[B, M, D]`` and the time ``[B, 6, D]``."""
        changes = (self.scale_shift_table.to(time) + time).chunk(6, dim=1)
        shift, scale, gate, ff_shift, ff_scale, ff_gate = changes
        given = rms_norm(x, eps=NORM_EPS) * (1 + scale) + shift
        x = x + gate * self.attn(given, places, options)
        x = x + self.cross_attn(x, told, places, told_places, options)
        return x + ff_gate * self.ff(rms_norm(x, eps=NORM_EPS) * (1 + ff_scale) + ff_shift)


class PatchEmbed(nn.Module):
    """A latent ``[B, C, H, W]`` as tokens ``[B, W, D]``."""

    def __init__(
        self, channels: int, patch: tuple[int, int], between: int, width: int, operations: Any,
        **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.early_conv_layers = nn.Sequential(
            operations.Conv2d(channels, between, patch, stride=patch, **place),
            operations.GroupNorm(GROUPS, between, eps=GROUP_EPS, **place),
            operations.Conv2d(between, width, 1, **place),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.early_conv_layers(x).flatten(2).transpose(1, 2)


class FinalLayer(nn.Module):
    """Tokens ``[B, W, D]`` as a latent ``[B, C, H, W]``."""

    def __init__(
        self, width: int, patch: tuple[int, int], channels: int, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.patch, self.channels = patch, channels
        self.linear = operations.Linear(width, patch[0] * patch[1] * channels, **place)
        self.scale_shift_table = nn.Parameter(torch.empty(2, width, **place))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale = (self.scale_shift_table.to(time) + time[:, None]).chunk(2, dim=1)
        x = self.linear(rms_norm(x, eps=NORM_EPS) * (1 + scale) + shift)
        x = x.unflatten(-1, (*self.patch, self.channels))  # [B, W, rows, columns, C]
        return x.permute(0, 4, 2, 1, 3).flatten(3)


class TimeEmbedding(nn.Module):
    """A time's waves as a vector."""

    def __init__(self, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.linear_1 = operations.Linear(TIME_WAVES, width, **place)
        self.linear_2 = operations.Linear(width, width, **place)

    def forward(self, times: Tensor, dtype: torch.dtype) -> Tensor:
        waves = timestep_embedding(times, TIME_WAVES).to(dtype)
        return self.linear_2(F.silu(self.linear_1(waves)))


class ACEStepTransformer2DModel(nn.Module):
    """Predicts the velocity of a noisy latent of music from a time, text, lyrics and a voice.

    Args:
        inner_dim: Width of the tokens.
        mlp_ratio: Width inside a feed-forward over that.
        patch_size: Rows and columns of a latent that a token stands for; all of the rows.
        rope_theta: Base of the wavelengths of positions.
        speaker_embedding_dim, text_embedding_dim: Width of a voice, and of text tokens.
        ssl_latent_dims: Widths of what heads used in training only give; files hold them.
        ssl_width: Channels inside those heads; None: twice the tokens'.
        conv_width: Channels behind the first convolution; None: 256 for each of the latent's.
        lyric_encoder_vocab_size: Kinds of tokens of lyrics.
        lyric_hidden_size, lyric_heads, lyric_layers, lyric_inner: See `LyricSizes`.
    """

    reads_patches = frozenset({patches.OUTPUT, patches.CROSS_OUTPUT})

    def __init__(
        self,
        in_channels: int = 8,
        out_channels: int = 8,
        inner_dim: int = 2560,
        num_layers: int = 24,
        num_attention_heads: int = 20,
        mlp_ratio: float = 2.5,
        patch_size: Sequence[int] = (16, 1),
        rope_theta: float = 1000000.0,
        speaker_embedding_dim: int = 512,
        text_embedding_dim: int = 768,
        ssl_latent_dims: Sequence[int] = (1024, 768),
        ssl_width: int | None = None,
        conv_width: int | None = None,
        lyric_encoder_vocab_size: int = 6693,
        lyric_hidden_size: int = 1024,
        lyric_heads: int = LyricSizes.heads,
        lyric_layers: int = LyricSizes.layers,
        lyric_inner: int = LyricSizes.inner,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        width, linear = inner_dim, operations.Linear
        place = {"dtype": dtype, "device": device}
        rows, columns = patch_size
        self.dtype, self.theta, self.rows = dtype, rope_theta, rows
        self.head, self.voice = width // num_attention_heads, speaker_embedding_dim
        self.transformer_blocks = nn.ModuleList(
            TransformerBlock(
                width, num_attention_heads, round(mlp_ratio * width), operations, **place
            )
            for _ in range(num_layers)
        )
        self.timestep_embedder = TimeEmbedding(width, operations, **place)
        self.t_block = nn.Sequential(nn.SiLU(), linear(width, 6 * width, **place))
        self.speaker_embedder = linear(speaker_embedding_dim, width, **place)
        self.genre_embedder = linear(text_embedding_dim, width, **place)
        sizes = LyricSizes(lyric_hidden_size, lyric_heads, lyric_layers, lyric_inner)
        self.lyric_embs = operations.Embedding(lyric_encoder_vocab_size, sizes.width, **place)
        self.lyric_encoder = LyricEncoder(sizes, operations, **place)
        self.lyric_proj = linear(sizes.width, width, **place)
        inner = ssl_width or 2 * width
        self.projectors = nn.ModuleList(
            nn.Sequential(
                linear(width, inner, **place),
                nn.SiLU(),
                linear(inner, inner, **place),
                nn.SiLU(),
                linear(inner, out, **place),
            )
            for out in ssl_latent_dims
        )
        between = conv_width or CONV_WIDTH * in_channels
        self.proj_in = PatchEmbed(in_channels, (rows, columns), between, width, operations, **place)
        self.final_layer = FinalLayer(width, (rows, columns), out_channels, operations, **place)

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Apply the network, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, H, W]``.
            timestep: Times ``[B]`` in 0..1000.
            context: Text tokens ``[B, T, D]``.
            kwargs: See `_told`.
        """
        options = {} if transformer_options is None else transformer_options
        arguments = (x, timestep, context, options)
        return run_wrapped(self._forward, self, "diffusion_model", options, *arguments, **kwargs)

    def _told(
        self,
        context: Tensor,
        speaker_embeds: Tensor | None = None,
        lyric_token_idx: Tensor | None = None,
        lyrics_strength: float = 1.0,
        **_: Any,
    ) -> Tensor:
        """What the tokens attend to ``[B, 1 + T + L, D]``.

        Args:
            speaker_embeds: A voice ``[B, S]``; None: no particular one.
            lyric_token_idx: Tokens of lyrics ``[B, L]``.
            lyrics_strength: What the lyrics' states are multiplied by.
        """
        if speaker_embeds is None:
            speaker_embeds = context.new_zeros(context.shape[0], self.voice)
        parts = [self.speaker_embedder(speaker_embeds)[:, None], self.genre_embedder(context)]
        if lyric_token_idx is not None:
            lyrics = self.lyric_embs(lyric_token_idx).to(context.dtype)
            parts.append(self.lyric_proj(self.lyric_encoder(lyrics)) * lyrics_strength)
        return torch.cat(parts, dim=1)

    def _forward(
        self, x: Tensor, timestep: Tensor, context: Tensor, options: Options, **kwargs: Any
    ) -> Tensor:
        if x.shape[2] != self.rows:
            raise ValueError(
                f"ACE-Step makes music in latents of {self.rows} rows, found shape "
                f"{tuple(x.shape)}; make one with EmptyAceStepLatentAudio"
            )
        told = self._told(context, **kwargs)
        time = self.timestep_embedder(timestep, x.dtype)
        changes = self.t_block(time).unflatten(-1, (6, -1))
        x = self.proj_in(x)
        places = rotations(x.shape[1], self.head, self.theta, x)
        told_places = rotations(told.shape[1], self.head, self.theta, x)
        options["total_blocks"], options["block_type"] = len(self.transformer_blocks), "double"
        for number, layer in enumerate(self.transformer_blocks):
            options["block_index"] = number
            x = layer(x, told, changes, places, told_places, options)
        return self.final_layer(x, time)
