"""Layers of LTX-2: two streams of tokens, of a video and of its sound, which look at each other.

Source: HaCohen et al. 2026, https://arxiv.org/abs/2601.03233.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from comfy.ldm.lightricks.layers import CrossAttention, FeedForward, Options, normed
from comfy.ldm.lightricks.rotations import Turn

QK_EPS = 1e-6


@dataclass(frozen=True)
class Stream:
    """One of the two: its tokens and what a block is told about them.

    Attributes:
        x: Tokens ``[B, N, D]``; none where the stream is absent.
        text: What it reads ``[B, L, D]``.
        mods: Shifts, scales and gates of its attention and feed-forward ``[B, 1 or N, 6 * D]``.
        look: Scales and shifts for looking at the other, and for being looked at
            ``[B, 1 or N, 4 * D]``.
        gate: How much of what it sees it takes ``[B, 1 or N, D]``.
        turn, time_turn: Turns by all places, and by time alone.
        embedded: The embedded times, for the last layer.
        told: Shifts and scales of its text by the time of the step ``[B, 1, 2 * D]``;
            None where texts are read as they are.
    """

    x: Tensor
    text: Tensor
    mods: Tensor
    look: Tensor
    gate: Tensor
    turn: Turn
    time_turn: Turn
    embedded: Tensor
    told: Tensor | None = None

    @property
    def is_there(self) -> bool:
        """Whether it has tokens."""
        return self.x.shape[1] > 0


@dataclass(frozen=True)
class StreamSizes:
    """Widths of a stream: of its tokens, of the text it reads, and number of heads.

    Attributes:
        is_gated: Whether its attentions have gates.
        modulates_text: Whether the time of the step changes how it reads its text.
    """

    width: int
    text_width: int
    heads: int
    is_gated: bool = False
    modulates_text: bool = False

    def __post_init__(self) -> None:
        if self.modulates_text and self.text_width != self.width:
            raise ValueError(
                f"a stream of width {self.width} modulates its text, but reads "
                f"one {self.text_width} wide; both must be the same"
            )

    @property
    def rows(self) -> int:
        """Shifts, scales and gates of a block: of its attentions and its feed-forward."""
        return 9 if self.modulates_text else 6

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads


def _rows(table: Tensor, times: Tensor) -> tuple[Tensor, ...]:
    """The rows of a table ``[K, D]``, each with what times ``[B, N, K * D]`` add to it."""
    return (table.to(times) + times.unflatten(-1, (table.shape[0], -1))).unbind(2)


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Tokens scaled and shifted."""
    return torch.addcmul(shift, x, 1 + scale)


class AVBlock(nn.Module):
    """One layer of both streams."""

    compiles_alone = True

    def __init__(self, video: StreamSizes, sound: StreamSizes, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        for prefix, sizes in (("", video), ("audio_", sound)):
            shared = _attention_options(sizes, sizes, parts)
            own = CrossAttention(sizes.width, is_patched=sizes is video, **shared)
            self.add_module(f"{prefix}attn1", own)
            told = CrossAttention(sizes.width, sizes.text_width, **shared)
            self.add_module(f"{prefix}attn2", told)
            self.add_module(f"{prefix}ff", FeedForward(sizes.width, sizes.width, **parts))
            table = nn.Parameter(torch.empty(sizes.rows, sizes.width, **place))
            self.register_parameter(f"{prefix}scale_shift_table", table)
            if sizes.modulates_text:
                table = nn.Parameter(torch.empty(2, sizes.width, **place))
                self.register_parameter(f"{prefix}prompt_scale_shift_table", table)
        hears, sees = (_attention_options(sizes, sound, parts) for sizes in (video, sound))
        self.audio_to_video_attn = CrossAttention(video.width, sound.width, **hears)
        self.video_to_audio_attn = CrossAttention(sound.width, video.width, **sees)
        self.scale_shift_table_a2v_ca_video = nn.Parameter(torch.empty(5, video.width, **place))
        self.scale_shift_table_a2v_ca_audio = nn.Parameter(torch.empty(5, sound.width, **place))

    def forward(
        self, video: Stream, sound: Stream, mask: Tensor | None, options: Options | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens of the video and of the sound; `mask` is added to the scores of their texts.

        Custom nodes leave parts out by setting entries of `options` to False: ``run_vx`` and
        ``run_ax`` a whole stream, ``a2v_cross_attn`` and ``v2a_cross_attn`` what the video hears
        and what the sound sees.
        """
        told = {} if options is None else options
        runs_video = told.get("run_vx", True)
        runs_sound = told.get("run_ax", True) and sound.is_there
        hears = runs_video and sound.is_there and told.get("a2v_cross_attn", True)
        sees = runs_sound and told.get("v2a_cross_attn", True)
        rows = [
            _rows(getattr(self, f"{prefix}scale_shift_table"), stream.mods)
            for prefix, stream in (("", video), ("audio_", sound))
        ]
        if runs_video:
            video = replace(video, x=self._read("", video, rows[0], mask, options))
        if runs_sound:
            sound = replace(sound, x=self._read("audio_", sound, rows[1], mask, options))
        v, s = video.x, sound.x
        if hears:
            v = self._hear(video, sound, options)
        if sees:
            s = self._see(video, sound, options)
        if runs_video:
            v = self._think("", v, rows[0])
        if runs_sound:
            s = self._think("audio_", s, rows[1])
        return v, s

    def _read(
        self,
        prefix: str,
        stream: Stream,
        rows: Sequence[Tensor],
        mask: Tensor | None,
        options: Options | None,
    ) -> Tensor:
        """Attention of a stream to itself and to its text."""
        shift, scale, gate = rows[:3]
        x, read = stream.x, stream.text
        own, text = getattr(self, f"{prefix}attn1"), getattr(self, f"{prefix}attn2")
        turned = modulated(normed(x), scale, shift)
        x = x + own(turned, pe=stream.turn, transformer_options=options) * gate
        if stream.told is None:
            return x + text(normed(x), read, mask, transformer_options=options)
        shift, scale, gate = rows[6:]
        looking = modulated(normed(x), scale, shift)
        shift, scale = _rows(getattr(self, f"{prefix}prompt_scale_shift_table"), stream.told)
        read = modulated(read, scale, shift)
        return x + text(looking, read, mask, transformer_options=options) * gate

    # Each table has scale and shift for sound into video, then for video into sound, then a gate.

    def _hear(self, video: Stream, sound: Stream, options: Options | None) -> Tensor:
        """The video's tokens with what they make of the sound."""
        looks, _, gate = _looks(self.scale_shift_table_a2v_ca_video, video)
        shown, _, _ = _looks(self.scale_shift_table_a2v_ca_audio, sound)
        made = self.audio_to_video_attn(
            modulated(normed(video.x), *looks), modulated(normed(sound.x), *shown),
            pe=video.time_turn, k_pe=sound.time_turn, transformer_options=options,
        )  # fmt: skip
        return video.x + gate * made

    def _see(self, video: Stream, sound: Stream, options: Options | None) -> Tensor:
        """The sound's tokens with what they make of the video."""
        _, shown, _ = _looks(self.scale_shift_table_a2v_ca_video, video)
        _, looks, gate = _looks(self.scale_shift_table_a2v_ca_audio, sound)
        made = self.video_to_audio_attn(
            modulated(normed(sound.x), *looks), modulated(normed(video.x), *shown),
            pe=sound.time_turn, k_pe=video.time_turn, transformer_options=options,
        )  # fmt: skip
        return sound.x + gate * made

    def _think(self, prefix: str, x: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Feed-forward of a stream."""
        shift, scale, gate = rows[3:6]
        layer = getattr(self, f"{prefix}ff")
        return x + layer(modulated(normed(x), scale, shift)) * gate


def _attention_options(own: StreamSizes, heads: StreamSizes, parts: Options) -> Options:
    """What makes a stream's attention, with the heads of one of the two."""
    gates = {"apply_gated_attention": own.is_gated, "eps": QK_EPS}
    return {"heads": heads.heads, "dim_head": heads.head, **gates, **parts}


def _looks(table: Tensor, stream: Stream) -> tuple[Any, Any, Tensor]:
    """Scale and shift for sound into video and for video into sound, and the gate."""
    rows = _rows(table[:4], stream.look)
    return rows[:2], rows[2:], _rows(table[4:], stream.gate)[0]
