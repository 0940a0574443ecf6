"""Packs the tokens of a prompt into chunks of the length a text encoder takes.

A group is the tokens of one weighted piece of text or of one embedding. A short group is not torn
apart: it moves to the next chunk when it does not fit. A group of `TEARABLE_LENGTH` tokens or more
fills the chunk and goes on in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TEARABLE_LENGTH = 8

WeightedToken = tuple[
    Any, float, int
]  # id or embedding row, weight, word number (0: not from the text)
Group = list[tuple[Any, float]]


@dataclass(frozen=True)
class ChunkRules:
    """Shape of a chunk.

    Attributes:
        max_length: Tokens in a chunk, start and end included.
        start: Token every chunk starts with, if any.
        end: Token every chunk ends with, if any.
        pad: Token that fills a chunk up.
        pad_to_max_length: Whether every chunk is filled up to max_length.
        min_length: Least length of the last chunk.
        min_padding: Pad tokens to add to the last chunk in any case.
        pad_left: Put the padding before the tokens.
    """

    max_length: int
    start: Any = None
    end: Any = None
    pad: Any = 0
    pad_to_max_length: bool = True
    min_length: int | None = None
    min_padding: int | None = None
    pad_left: bool = False


def make_chunks(groups: Sequence[Group], rules: ChunkRules) -> list[list[WeightedToken]]:
    """Pack groups into chunks; there is always at least one chunk."""
    packer = _Packer(rules)
    for number, group in enumerate(groups, start=1):
        packer.add([(token, weight, number) for token, weight in group])
    return packer.finish()


class _Packer:
    """Fills one chunk after the other."""

    def __init__(self, rules: ChunkRules) -> None:
        self.rules = rules
        self.capacity = rules.max_length - (rules.end is not None)
        self.chunks: list[list[WeightedToken]] = []
        self._open()

    def _open(self) -> None:
        start = self.rules.start
        self.chunks.append([] if start is None else [(start, 1.0, 0)])

    def _close(self) -> None:
        if self.rules.end is not None:
            self.chunks[-1].append((self.rules.end, 1.0, 0))

    def add(self, tokens: list[WeightedToken]) -> None:
        tearable = len(tokens) >= TEARABLE_LENGTH
        while tokens:
            chunk = self.chunks[-1]
            room = self.capacity - len(chunk)
            if len(tokens) <= room:
                chunk.extend(tokens)
                return
            if tearable:
                chunk.extend(tokens[:room])
                tokens = tokens[room:]
                self._close()
            else:
                self._close()
                if self.rules.pad_to_max_length:
                    self._pad(chunk, room)
            self._open()

    def finish(self) -> list[list[WeightedToken]]:
        rules, chunk = self.rules, self.chunks[-1]
        self._close()
        if rules.min_padding is not None:
            self._pad(chunk, rules.min_padding)
        if rules.pad_to_max_length:
            self._pad(chunk, rules.max_length - len(chunk))
        if rules.min_length is not None:
            self._pad(chunk, rules.min_length - len(chunk))
        return self.chunks

    def _pad(self, chunk: list[WeightedToken], count: int) -> None:
        padding = [(self.rules.pad, 1.0, 0)] * max(0, count)
        if self.rules.pad_left:
            chunk[:0] = padding
        else:
            chunk.extend(padding)
