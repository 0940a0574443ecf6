"""Brownian motion whose value over an interval does not depend on how it was asked for.

A binary tree halves the time between two ends. The increment over a half is drawn from that over
the whole, with a seed made of the entropy and the half's place in the tree. The numbers are those
of torchsde's BrownianTree: users' seeds depend on them. Here one walk down serves a query, and what
was drawn is kept, so that the next step, which begins where this one ends, draws nothing twice.
Of numpy's seed mixing (SeedSequence) only what depends on the place in the tree is done anew.
Source: Li et al. 2020, https://arxiv.org/abs/2001.01328, section 4; the conditional law of a bridge
(Levy).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

DECIMALS = 6
"""Places of times; below that the motion is not refined."""
POOL_SIZE = 24
"""Words of entropy that each seed is mixed from."""
WORD = 0xFFFFFFFF
"""Seeds are mixed in words of 32 bits."""
IN_START, IN_STEP = 0x43B0D7E5, 0x931E8875
OUT_START, OUT_STEP = 0x8B51F9DD, 0x58F38DED
MIX_POOL, MIX_WORD = 0xCA01F9DD, 0x4973F715
"""Factors of the mixing (O'Neill's randutils, 2015): of words that enter the pool, of words that
leave it, and of the two that are mixed."""
KEPT_BYTES = 32 << 20
KEPT_AT_LEAST = 48
"""Draws that are kept: about two ways down the tree."""


class _Part(NamedTuple):
    """A part of the time: its ends, its number in its level and its level."""

    start: float
    end: float
    number: int
    level: int

    @property
    def middle(self) -> float:
        return round(0.5 * (self.end + self.start), DECIMALS)

    def halves(self) -> tuple[_Part, _Part]:
        middle, number, level = self.middle, 2 * self.number, self.level + 1
        return (
            _Part(self.start, middle, number, level),
            _Part(middle, self.end, number + 1, level),
        )


class PlaceSeeds:
    """First word of ``SeedSequence(entropy, spawn_key=place)`` for any place, at once.

    The entropy fills the pool; the words of a place are mixed in after it, and the first word of
    the pool is all that the first word of the result is made of.

    Args:
        entropy: Whole number of at most `POOL_SIZE` words.
    """

    def __init__(self, entropy: int) -> None:
        self._pool = int(np.random.SeedSequence(entropy=entropy, pool_size=POOL_SIZE).pool[0])

    def __call__(self, place: tuple[int, int]) -> int:
        """Seed of a place in the tree."""
        pool, count = self._pool, POOL_SIZE * POOL_SIZE  # words that have entered the pool
        for word in _words(place):
            factor = IN_START * pow(IN_STEP, count, WORD + 1) & WORD
            entering = _folded((word ^ factor) * (factor * IN_STEP & WORD))
            pool = _folded(MIX_POOL * pool - MIX_WORD * entering)
            count += POOL_SIZE
        return _folded((pool ^ OUT_START) * (OUT_START * OUT_STEP & WORD))


def _words(numbers: tuple[int, ...]) -> Iterator[int]:
    """Numbers in words, the lowest first; at least one of each."""
    for number in numbers:
        yield number & WORD
        while number := number >> 32:
            yield number & WORD


def _folded(number: int) -> int:
    """The lowest word of a number, its upper half folded into the lower."""
    word = number & WORD
    return word ^ word >> 16


class BrownianTree:
    """One Brownian motion between two times.

    Args:
        like: Tensor whose shape, dtype and device the increments have.
        start, end: Times, start below end.
        entropy: Whole number that the motion is made of.
    """

    def __init__(self, like: Tensor, start: float, end: float, entropy: int) -> None:
        self._like, self._seeds = like, PlaceSeeds(entropy)
        self._whole = _Part(round(start, DECIMALS), round(end, DECIMALS), 0, 0)
        seed = np.random.SeedSequence(entropy=entropy, pool_size=POOL_SIZE).generate_state(3)[0]
        self._increment = self._draw(int(seed)) * math.sqrt(end - start)
        size = max(1, like.numel() * like.element_size())
        self._most = max(KEPT_AT_LEAST, KEPT_BYTES // size)
        self._firsts: OrderedDict[tuple[int, int], Tensor] = OrderedDict()

    def __call__(self, start: float, end: float) -> Tensor:
        """Increment from one time to a later one, both between the ends."""
        start, end = round(start, DECIMALS), round(end, DECIMALS)
        if start == end:
            return torch.zeros_like(self._like)
        pieces = self._pieces(start, end)
        total = next(pieces)
        for piece in pieces:
            total = total + piece
        return total

    def _pieces(self, start: float, end: float) -> Iterator[Tensor]:
        """Increments over the parts that make up a span, in the order of time."""
        waiting = [(self._whole, self._increment, start, end)]
        while waiting:
            part, increment, start, end = waiting.pop()
            if (start, end) == (part.start, part.end):
                yield increment
                continue
            first = self._first_half(part, increment)
            left, right = part.halves()
            if end > left.end:
                waiting.append((right, increment - first, max(start, left.end), end))
            if start < left.end:
                waiting.append((left, first, start, min(end, left.end)))

    def _first_half(self, part: _Part, increment: Tensor) -> Tensor:
        """Increment over the first half of a part, given that over the whole of it."""
        place = (part.number, part.level)
        known = self._firsts.get(place)
        if known is not None:
            self._firsts.move_to_end(place)
            return known
        share = 1 / (part.end - part.start)
        before, after = part.middle - part.start, part.end - part.middle
        drawn = self._draw(self._seeds(place)).mul_(math.sqrt(before * after * share))
        first = drawn.add_(before * increment * share)
        self._firsts[place] = first
        if len(self._firsts) > self._most:
            self._firsts.popitem(last=False)
        return first

    def _draw(self, seed: int) -> Tensor:
        like = self._like
        generator = torch.Generator(like.device).manual_seed(seed)
        return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)
