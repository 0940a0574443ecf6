"""Blocks of Stable Cascade's two diffusion networks, and how they follow each other.

Both are U-shaped: levels of residual blocks, times and attention with the text, whose results are
joined again on the way back.
Source: https://arxiv.org/abs/2306.00637.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy.nn import attention, patches

NORM_EPS = 1e-6
MOST_POSITIONS = 10000
WIDER = 4  # times the width, inside a residual block
Options = dict[str, Any]


class LayerNorm2d(nn.Module):
    """A norm over the channels of each cell, without weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, -1)
        return functional.layer_norm(x, (self.width,), eps=NORM_EPS).movedim(-1, 1)


class GlobalResponseNorm(nn.Module):
    """Channels times their share of the picture's strength.

    Source: https://arxiv.org/abs/2301.00808.
    """

    def __init__(self, width: int, **place: Any) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(1, 1, 1, width, **place))
        self.beta = nn.Parameter(torch.empty(1, 1, 1, width, **place))

    def forward(self, x: Tensor) -> Tensor:
        """``x [B, H, W, C]``."""
        strength = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        share = strength / (strength.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma.to(x) * (x * share) + self.beta.to(x) + x


class ResBlock(nn.Module):
    """A convolution of each channel, then layers over each cell; joins what it is given."""

    compiles_alone = True

    def __init__(self, width: int, joined: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.depthwise = operations.Conv2d(width, width, 3, padding=1, groups=width, **place)
        self.norm = LayerNorm2d(width)
        inner = WIDER * width
        self.channelwise = nn.Sequential(
            operations.Linear(width + joined, inner, **place),
            nn.GELU(),
            GlobalResponseNorm(inner, **place),
            nn.Identity(),
            operations.Linear(inner, width, **place),
        )

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        normed = self.norm(self.depthwise(x))
        if skip is not None:
            normed = torch.cat([normed, skip], dim=1)
        return x + self.channelwise(normed.movedim(1, -1)).movedim(-1, 1)


class Projections(nn.Module):
    """Queries, keys, values and the projection after the attention."""

    to_q: nn.Module
    to_k: nn.Module
    to_v: nn.Module
    out_proj: nn.Module

    def __init__(self, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        for name in ("to_q", "to_k", "to_v", "out_proj"):
            setattr(self, name, operations.Linear(width, width, **place))


class Attention2D(nn.Module):
    """Attention of cells with each other and with the text."""

    def __init__(self, width: int, heads: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.heads = heads
        self.attn = Projections(width, operations, **place)

    def forward(self, x: Tensor, text: Tensor, options: Options) -> Tensor:
        cells = x.flatten(2).transpose(1, 2)
        seen = torch.cat([cells, text], dim=1)
        parts = self.attn.to_q(cells), self.attn.to_k(seen), self.attn.to_v(seen)
        out = attention.optimized_attention(*parts, self.heads, transformer_options=options)
        out = patches.attention_output(out, options, self.heads, None)
        return self.attn.out_proj(out).transpose(1, 2).view_as(x)


class AttnBlock(nn.Module):
    """Attention with a norm before."""

    compiles_alone = True

    def __init__(
        self, width: int, text_width: int, heads: int, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.norm = LayerNorm2d(width)
        self.attention = Attention2D(width, heads, operations, **place)
        linear = operations.Linear(text_width, width, **place)
        self.kv_mapper = nn.Sequential(nn.SiLU(), linear)

    def forward(self, x: Tensor, text: Tensor, transformer_options: Options) -> Tensor:
        return x + self.attention(self.norm(x), self.kv_mapper(text), transformer_options)


class TimestepBlock(nn.Module):
    """Shift and scale by the time and by further numbers."""

    def __init__(
        self, width: int, waves: int, numbers: Sequence[str], operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.names = ["mapper", *(f"mapper_{name}" for name in numbers)]
        for name in self.names:
            setattr(self, name, operations.Linear(waves, 2 * width, **place))

    def forward(self, x: Tensor, waves: Tensor) -> Tensor:
        parts = waves.chunk(len(self.names), dim=1)
        changes = [getattr(self, name)(part) for name, part in zip(self.names, parts)]
        scale, shift = torch.stack(changes).sum(0)[:, :, None, None].chunk(2, dim=1)
        return x * (1 + scale) + shift


def number_waves(number: Tensor, count: int) -> Tensor:
    """``[sin, cos]`` of numbers 0..1 at ``count / 2`` frequencies, float32 ``[B, count]``."""
    half = count // 2
    step = math.log(MOST_POSITIONS) / (half - 1)
    frequencies = torch.exp(-step * torch.arange(half, device=number.device, dtype=torch.float32))
    angles = number.float()[:, None] * MOST_POSITIONS * frequencies
    return functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, count % 2))


def level_blocks(
    kinds: str,
    count: int,
    make: Callable[[str, int], nn.Module],
    joined: int = 0,
) -> nn.ModuleList:
    """Blocks of one level.

    Args:
        kinds: Letters of the blocks that follow each other, ``count`` times: C residual, T time,
            A attention.
        make: Makes a block of a kind, with channels that it joins.
        joined: Channels that the first joins.
    """
    blocks = nn.ModuleList()
    for number in range(count):
        for place, kind in enumerate(kinds):
            blocks.append(make(kind, joined if number == place == 0 else 0))
    return blocks


class Levels(nn.Module):
    """A network of levels; its classes say what comes before and after them."""

    down_blocks: nn.ModuleList
    down_downscalers: nn.ModuleList
    down_repeat_mappers: nn.ModuleList
    up_blocks: nn.ModuleList
    up_upscalers: nn.ModuleList
    up_repeat_mappers: nn.ModuleList
    reads_patches = frozenset({patches.OUTPUT})

    def build_levels(
        self,
        widths: Sequence[int],
        heads: Sequence[int],
        blocks: Sequence[Sequence[int]],
        repeats: Sequence[Sequence[int]],
        kinds: Sequence[str],
        text_width: int,
        waves: int,
        numbers: Sequence[str],
        parts: dict[str, Any],
    ) -> None:
        """Make the blocks of all levels.

        Args:
            blocks, repeats: How many groups of blocks each level has and how often they run; on
                the way down and on the way up.
            kinds: As `level_blocks` has them.
            numbers: What the network is told beside the time.
        """
        operations = parts["operations"]
        place = {name: value for name, value in parts.items() if name != "operations"}

        def maker(level: int) -> Callable[[str, int], nn.Module]:
            def make(kind: str, joined: int) -> nn.Module:
                width = widths[level]
                if kind == "C":
                    return ResBlock(width, joined, **parts)
                if kind == "A":
                    return AttnBlock(width, text_width, heads[level], **parts)
                return TimestepBlock(width, waves, numbers, **parts)

            return make

        def mappers(level: int, count: int) -> nn.ModuleList:
            width = widths[level]
            return nn.ModuleList(
                operations.Conv2d(width, width, 1, **place) for _ in range(count - 1)
            )

        last = len(widths) - 1
        self.down_blocks, self.up_blocks = nn.ModuleList(), nn.ModuleList()
        self.down_repeat_mappers, self.up_repeat_mappers = nn.ModuleList(), nn.ModuleList()
        for level in range(last + 1):
            group = level_blocks(kinds[level], blocks[0][level], maker(level))
            self.down_blocks.append(group)
            self.down_repeat_mappers.append(mappers(level, repeats[0][level]))
        for level in reversed(range(last + 1)):
            joined = widths[level] if level < last else 0
            count = blocks[1][last - level]
            group = level_blocks(kinds[level], count, maker(level), joined)
            self.up_blocks.append(group)
            self.up_repeat_mappers.append(mappers(level, repeats[1][last - level]))

    def run_levels(self, x: Tensor, waves: Tensor, text: Tensor, options: Options) -> Tensor:
        """All levels down and up again."""
        results: list[Tensor] = []
        down: Any = zip(self.down_blocks, self.down_downscalers, self.down_repeat_mappers)
        for blocks, smaller, again in down:
            x = smaller(x)
            for number in range(len(again) + 1):
                for block in blocks:
                    x = run_block(block, x, waves, text, None, options)
                if number < len(again):
                    x = again[number](x)
            results.insert(0, x)
        x = results[0]
        up: Any = zip(self.up_blocks, self.up_upscalers, self.up_repeat_mappers)
        for level, (blocks, larger, again) in enumerate(up):
            for number in range(len(again) + 1):
                for place, block in enumerate(blocks):
                    skip = results[level] if place == 0 and level > 0 else None
                    if skip is not None and skip.shape[-2:] != x.shape[-2:]:
                        x = resized(x, skip.shape[-2:])
                    x = run_block(block, x, waves, text, skip, options)
                if number < len(again):
                    x = again[number](x)
            x = larger(x)
        return x


def run_block(
    block: nn.Module, x: Tensor, waves: Tensor, text: Tensor, skip: Tensor | None, options: Options
) -> Tensor:
    """One block with what its kind takes."""
    if isinstance(block, ResBlock):
        return block(x, skip)
    if isinstance(block, AttnBlock):
        return block(x, text, transformer_options=options)
    return block(x, waves)


def resized(x: Tensor, size: Iterable[int]) -> Tensor:
    """Rows and columns so many, with the corners at the corners."""
    return functional.interpolate(x, tuple(size), mode="bilinear", align_corners=True)


def all_waves(time: Tensor, numbers: Iterable[Tensor | None], count: int) -> Tensor:
    """Waves of the time and of further numbers, 0 where they are not told."""
    parts = [time, *(torch.zeros_like(time) if n is None else n.to(time) for n in numbers)]
    return torch.cat([number_waves(part, count) for part in parts], dim=1)


def tokens_of(mapper: nn.Module, vector: Tensor, count: int) -> Tensor:
    """Vectors ``[B, D]`` or ``[B, N, D]`` as ``count`` tokens each."""
    vector = vector[:, None] if vector.ndim == 2 else vector
    return mapper(vector).unflatten(-1, (count, -1)).flatten(1, 2)
