"""The network of ACE-Step 1.5: a transformer over cells of music, with what it is told.

A latent of music is ``[B, 64, L]`` with 25 cells a second; a token stands for two cells.
Custom nodes reach in through ``transformer_options``: ``patches["attn1_output_patch"]`` and
``patches["attn2_output_patch"]``.
Source: https://github.com/ace-step/ACE-Step-1.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.ace.conditions15 import AudioTokenizer, ConditionEncoder, Detokenizer
from comfy.ldm.ace.layers15 import (
    MLP,
    NORM_EPS,
    Attention,
    LayerSizes,
    Options,
    Turn,
    mask_of_layer,
    near_mask,
    rotations,
)
from comfy.ldm.llm.model import RMSNorm
from comfy.nn import patches
from comfy.nn.timesteps import timestep_embedding
from comfy.nn.wrappers import run_wrapped

TIME_WAVES, TIME_SCALE = 256, 1000.0
VOICE_CELLS = 750  # of the music that a voice is taken from: 30 seconds


class TimeEmbedding(nn.Module):
    """A time in 0..1 as a vector, and as six changes of every layer."""

    def __init__(self, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.linear_1 = operations.Linear(TIME_WAVES, width, **place)
        self.linear_2 = operations.Linear(width, width, **place)
        self.time_proj = operations.Linear(width, 6 * width, **place)

    def forward(self, times: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``[B, D]`` and ``[B, 6, D]``."""
        waves = timestep_embedding(times * TIME_SCALE, TIME_WAVES).to(dtype)
        time = self.linear_2(functional.silu(self.linear_1(waves)))
        return time, self.time_proj(functional.silu(time)).unflatten(-1, (6, -1))


class DecoderLayer(nn.Module):
    """A layer: the cells among each other, with what is told, and alone."""

    compiles_alone = True

    def __init__(self, sizes: LayerSizes, operations: Any, **place: Any) -> None:
        super().__init__()
        self.self_attn_norm = RMSNorm(sizes.width, NORM_EPS, **place)
        self.self_attn = Attention(sizes, operations, **place)
        self.cross_attn_norm = RMSNorm(sizes.width, NORM_EPS, **place)
        self.cross_attn = Attention(sizes, operations, **place)
        self.mlp_norm = RMSNorm(sizes.width, NORM_EPS, **place)
        self.mlp = MLP(sizes, operations, **place)
        self.scale_shift_table = nn.Parameter(torch.empty(1, 6, sizes.width, **place))

    def forward(
        self, x: Tensor, told: Tensor, time: Tensor, turn: Turn, mask: Tensor | None,
        options: Options,
    ) -> Tensor:  # fmt: skip
        """Tokens ``[B, L, D]``, what is told ``[B, M, D]`` and the time ``[B, 6, D]``."""
        changes = (self.scale_shift_table.to(time) + time).chunk(6, dim=1)
        shift, scale, gate, ff_shift, ff_scale, ff_gate = changes
        given = self.self_attn_norm(x) * (1 + scale) + shift
        x = x + gate * self.self_attn(given, turn, mask, options=options)
        x = x + self.cross_attn(self.cross_attn_norm(x), told=told, options=options)
        return x + ff_gate * self.mlp(self.mlp_norm(x) * (1 + ff_scale) + ff_shift)


class Decoder(nn.Module):
    """Predicts the velocity of noisy cells.

    Args:
        inputs, outputs: Channels of a cell with its context, and of the velocity.
        patch: Cells that a token stands for.
        told: Channels of what is told.
    """

    def __init__(
        self, inputs: int, outputs: int, patch: int, told: int, sizes: LayerSizes,
        operations: Any, **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        width, self.patch, self.head = sizes.width, patch, sizes.head
        self.layers = nn.ModuleList(
            DecoderLayer(sizes, operations, **place) for _ in range(sizes.layers)
        )
        # The published modules have transpositions before and behind, which count in the keys.
        into = operations.Conv1d(inputs, width, patch, stride=patch, **place)
        self.proj_in = nn.Sequential(nn.Identity(), into)
        self.time_embed = TimeEmbedding(width, operations, **place)
        self.time_embed_r = TimeEmbedding(width, operations, **place)
        self.condition_embedder = operations.Linear(told, width, **place)
        self.norm_out = RMSNorm(width, NORM_EPS, **place)
        out = operations.ConvTranspose1d(width, outputs, patch, stride=patch, **place)
        self.proj_out = nn.Sequential(nn.Identity(), out)
        self.scale_shift_table = nn.Parameter(torch.empty(1, 2, width, **place))

    def forward(
        self, x: Tensor, times: Tensor, told: Tensor, context: Tensor, options: Options
    ) -> Tensor:
        """Velocity ``[B, outputs, L]``.

        Args:
            x: Noisy latent ``[B, outputs, L]``.
            times: ``[B]`` in 0..1.
            told: ``[B, M, told]``.
            context: What stands before the latent's channels ``[B, inputs - outputs, L]``.
        """
        time, changes = self.time_embed(times, x.dtype)
        step, step_changes = self.time_embed_r(torch.zeros_like(times), x.dtype)  # none is skipped
        time, changes = time + step, changes + step_changes
        length = x.shape[-1]
        cells = functional.pad(torch.cat([context, x], dim=1), (0, -length % self.patch))
        tokens = self.proj_in(cells).transpose(1, 2)
        told = self.condition_embedder(told)
        turn = rotations(tokens.shape[1], self.head, tokens)
        near = near_mask(tokens.shape[1], tokens)
        options["total_blocks"], options["block_type"] = len(self.layers), "double"
        for number, layer in enumerate(self.layers):
            options["block_index"] = number
            mask = mask_of_layer(number, near)
            tokens = layer(tokens, told, changes, turn, mask, options)
        table = self.scale_shift_table.to(time) + time[:, None]
        shift, scale = table.chunk(2, dim=1)
        tokens = self.norm_out(tokens) * (1 + scale) + shift
        return self.proj_out(tokens.transpose(1, 2))[..., :length]


class AceStep15(nn.Module):
    """The decoder with the encoders of what it is told.

    Args:
        in_channels: Channels of a cell with its context.
        out_channels: Channels of a latent.
        patch_size: Cells of a token.
        text_dim: Channels of tokens of text and lyrics.
        quantized: Channels of the vector that a code stands for.
        cells_of_code: Cells that a code stands for.
        decoder, lyrics, timbre, tokenizer, detokenizer: Arguments of `LayerSizes` of each part.
    """

    reads_patches = frozenset({patches.OUTPUT, patches.CROSS_OUTPUT})

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        patch_size: int,
        text_dim: int,
        quantized: int,
        cells_of_code: int,
        decoder: Mapping[str, int],
        lyrics: Mapping[str, int],
        timbre: Mapping[str, int],
        tokenizer: Mapping[str, int],
        detokenizer: Mapping[str, int],
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.dtype, channels, width = dtype, out_channels, lyrics["width"]
        self.decoder = Decoder(
            in_channels, channels, patch_size, width, LayerSizes(**decoder), operations, **place
        )
        self.encoder = ConditionEncoder(
            text_dim, channels, LayerSizes(**lyrics), LayerSizes(**timbre), operations, **place
        )
        self.tokenizer = AudioTokenizer(
            channels, quantized, LayerSizes(**tokenizer), operations, **place
        )
        self.detokenizer = Detokenizer(
            channels, cells_of_code, LayerSizes(**detokenizer), operations, **place
        )
        self.null_condition_emb = nn.Parameter(torch.empty(1, 1, width, **place))

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        transformer_options: Options | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Velocity of a noisy latent, through the wrappers of ``transformer_options``.

        Args:
            x: Noisy latent ``[B, C, L]``.
            timestep: Times ``[B]`` in 0..1.
            context: States of the text ``[B, T, D]``.
            kwargs: See `_forward`.
        """
        options = {} if transformer_options is None else transformer_options
        arguments = (x, timestep, context, options)
        return run_wrapped(self._forward, self, "diffusion_model", options, *arguments, **kwargs)

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor,
        options: Options,
        lyric_embed: Tensor,
        silence: Tensor,
        audio_codes: Tensor | None = None,
        is_told_nothing: bool = False,
        **_: Any,
    ) -> Tensor:
        """See `forward`.

        Args:
            lyric_embed: Rows of the table of tokens, of the lyrics ``[B, n, D]``.
            silence: Latent of silence ``[B, C, cells]``, at least as long as `x` and 750 cells.
            audio_codes: ``[B, n]``; what they say stands in place of the silence.
            is_told_nothing: In place of text, lyrics and voice is what was learned for none.
        """
        told = self.encoder(context, lyric_embed, silence[..., :VOICE_CELLS].transpose(1, 2))
        if is_told_nothing:
            told = self.null_condition_emb.to(told).expand_as(told)
        source = silence[..., : x.shape[-1]]
        if audio_codes is not None:
            source = self._with_codes(source, audio_codes)
        return self.decoder(x, timestep, told, torch.cat([source, torch.ones_like(x)], 1), options)

    def _with_codes(self, silence: Tensor, codes: Tensor) -> Tensor:
        """Latents of codes; where there are none yet or no more, silence."""
        vectors = self.tokenizer.quantizer.vectors(codes).to(silence.dtype)
        made = self.detokenizer(vectors).transpose(1, 2)[..., : silence.shape[-1]]
        return torch.cat([made, silence[..., made.shape[-1] :]], dim=-1)
