"""Keys and values of the tokens that a language model has read, so that each is computed once."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FIRST_ROOM = 256  # tokens, if there will be so many; doubled whenever it is full


@dataclass
class LayerCache:
    """What one layer keeps.

    Attributes:
        most: How many tokens there will be at most.
        length: How many there are.
    """

    most: int
    length: int = 0
    _kept: Tensor | None = field(default=None, repr=False)  # [2, B, groups, room, D]

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in those of further tokens ``[B, groups, L, D]``; returns all, as views."""
        start, self.length = self.length, self.length + keys.shape[2]
        kept = self._kept = self._with_room(keys)
        kept[0, :, :, start : self.length] = keys
        kept[1, :, :, start : self.length] = values
        return kept[0, :, :, : self.length], kept[1, :, :, : self.length]

    def _with_room(self, like: Tensor) -> Tensor:
        room = 0 if self._kept is None else self._kept.shape[3]
        if self._kept is not None and self.length <= room:
            return self._kept
        room = max(self.length, min(max(2 * room, FIRST_ROOM), self.most))
        batch, groups, _, width = like.shape
        grown = torch.empty(2, batch, groups, room, width, dtype=like.dtype, device=like.device)
        if self._kept is not None:
            grown[:, :, :, : self._kept.shape[3]] = self._kept
        return grown


@dataclass
class DeltaCache:
    """What one layer with a memory of fixed size keeps; see `comfy.ldm.llm.delta`.

    Attributes:
        state: Matrices ``[B, heads, K, V]``, None before the first token.
        length: How many tokens were read.
    """

    state: Tensor | None = None
    length: int = 0
    _latest: Tensor | None = field(default=None, repr=False)

    def window(self, channels: Tensor, kernel: int) -> Tensor:
        """Channels ``[B, C, kernel - 1 + L]`` of tokens ``[B, C, L]`` and of those before them that
        a convolution sees, zeros where there were none.
        """
        self.length += channels.shape[2]
        latest = self._latest
        if latest is None:
            latest = channels.new_zeros(*channels.shape[:2], kernel - 1)
        whole = torch.cat([latest, channels], dim=2)
        self._latest = whole[:, :, whole.shape[2] - kernel + 1 :].clone()
        return whole


class KeyValueCache:
    """What all layers keep of one text.

    Args:
        layers: How many layers.
        most: How many tokens there will be at most.
        fixed: Numbers of the layers whose memory has a fixed size.

    Attributes:
        layers: Of each layer.
        next_place: Place of the next token; with pictures in a text it is not the number of tokens.
    """

    def __init__(self, layers: int, most: int, fixed: Collection[int] = ()) -> None:
        self.layers: list[Any] = [
            DeltaCache() if number in fixed else LayerCache(most) for number in range(layers)
        ]
        self.next_place = 0

    @property
    def length(self) -> int:
        """How many tokens were read."""
        return self.layers[0].length


def cache_bytes(layers: int, groups: int, width: int, tokens: int, itemsize: int) -> int:
    """Bytes that a cache of so many tokens takes at most; one layer is there twice while it grows.

    Args:
        groups: Heads of keys.
        width: Channels of a head.
        itemsize: Bytes of a number.
    """
    return (layers + 1) * 2 * groups * tokens * width * itemsize
