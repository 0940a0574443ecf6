"""Layers of LTX-2: two streams of tokens, of a video and of its sound, which look at each other.

Source: HaCohen et al. 2026, https://arxiv.org/abs/2601.03233.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from comfy.ldm.lightricks.layers import Attention, FeedForward, Options, normed
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
    """

    x: Tensor
    text: Tensor
    mods: Tensor
    look: Tensor
    gate: Tensor
    turn: Turn
    time_turn: Turn
    embedded: Tensor

    @property
    def is_there(self) -> bool:
        """Whether it has tokens."""
        return self.x.shape[1] > 0


@dataclass(frozen=True)
class StreamSizes:
    """Widths of a stream: of its tokens, of the text it reads, and number of heads."""

    width: int
    text_width: int
    heads: int


def _rows(table: Tensor, times: Tensor) -> tuple[Tensor, ...]:
    """The rows of a table ``[K, D]``, each with what times ``[B, N, K * D]`` add to it."""
    return (table.to(times) + times.unflatten(-1, (table.shape[0], -1))).unbind(2)


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Tokens stretched and moved."""
    return torch.addcmul(shift, x, 1 + scale)


class AVBlock(nn.Module):
    """One layer of both streams."""

    compiles_alone = True

    def __init__(self, video: StreamSizes, sound: StreamSizes, parts: Options) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        for prefix, sizes in (("", video), ("audio_", sound)):
            own = (sizes.width, sizes.width, sizes.heads, parts)
            told = (sizes.width, sizes.text_width, sizes.heads, parts)
            is_video = sizes is video
            self.add_module(f"{prefix}attn1", Attention(*own, eps=QK_EPS, is_patched=is_video))
            self.add_module(f"{prefix}attn2", Attention(*told, eps=QK_EPS))
            self.add_module(f"{prefix}ff", FeedForward(sizes.width, parts))
            table = nn.Parameter(torch.empty(6, sizes.width, **place))
            self.register_parameter(f"{prefix}scale_shift_table", table)
        inner, heads = sound.width, sound.heads
        self.audio_to_video_attn = Attention(video.width, inner, heads, parts, inner, QK_EPS)
        self.video_to_audio_attn = Attention(inner, video.width, heads, parts, inner, QK_EPS)
        self.scale_shift_table_a2v_ca_video = nn.Parameter(torch.empty(5, video.width, **place))
        self.scale_shift_table_a2v_ca_audio = nn.Parameter(torch.empty(5, sound.width, **place))

    def forward(
        self, video: Stream, sound: Stream, mask: Tensor | None, options: Options | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens of the video and of the sound; `mask` is added to the scores of their texts."""
        told = tuple(
            _rows(getattr(self, f"{prefix}scale_shift_table"), stream.mods)
            for prefix, stream in (("", video), ("audio_", sound))
        )
        video = replace(video, x=self._read("", video, told[0], mask, options))
        if not sound.is_there:
            return self._think("", video.x, told[0]), sound.x
        sound = replace(sound, x=self._read("audio_", sound, told[1], mask, options))
        seen, heard = self._look(video, sound, options)
        return self._think("", seen, told[0]), self._think("audio_", heard, told[1])

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
        x = stream.x
        own, text = getattr(self, f"{prefix}attn1"), getattr(self, f"{prefix}attn2")
        x = x + own(modulated(normed(x), scale, shift), turn=stream.turn, options=options) * gate
        return x + text(normed(x), stream.text, mask, options=options)

    def _look(self, video: Stream, sound: Stream, options: Options | None) -> tuple[Tensor, Tensor]:
        """Attention of each stream to the other, as both were before it."""
        tables = (self.scale_shift_table_a2v_ca_video, self.scale_shift_table_a2v_ca_audio)
        # Each has scale and shift for sound into video, then for video into sound, then its gate.
        v_looks, v_shown, v_gate = _looks(tables[0], video)
        s_shown, s_looks, s_gate = _looks(tables[1], sound)
        v, s = normed(video.x), normed(sound.x)
        to_video = self.audio_to_video_attn(
            modulated(v, *v_looks), modulated(s, *s_shown),
            turn=video.time_turn, seen_turn=sound.time_turn, options=options,
        )  # fmt: skip
        to_sound = self.video_to_audio_attn(
            modulated(s, *s_looks), modulated(v, *v_shown),
            turn=sound.time_turn, seen_turn=video.time_turn, options=options,
        )  # fmt: skip
        return video.x + v_gate * to_video, sound.x + s_gate * to_sound

    def _think(self, prefix: str, x: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Feed-forward of a stream."""
        shift, scale, gate = rows[3:]
        layer = getattr(self, f"{prefix}ff")
        return x + layer(modulated(normed(x), scale, shift)) * gate


def _looks(table: Tensor, stream: Stream) -> tuple[Any, Any, Tensor]:
    """Scale and shift for sound into video and for video into sound, and the gate."""
    rows = _rows(table[:4], stream.look)
    return rows[:2], rows[2:], _rows(table[4:], stream.gate)[0]
