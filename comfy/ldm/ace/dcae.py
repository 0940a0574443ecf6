"""The deep compression autoencoder of ACE-Step: spectrograms as small pictures, and back.

Sizes change by convolutions with a path beside them that only regroups cells and channels. The
innermost levels attend linearly, over several reaches at once.
Keys follow the files of the diffusers library.
Source: Chen et al. 2024, https://arxiv.org/abs/2410.10733; Cai et al. 2022,
https://arxiv.org/abs/2205.14756, for the attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy.ldm.common_dit import rms_norm

NORM_EPS, DIVISION_EPS = 1e-5, 1e-15
EXPANSION = 4  # channels inside a feed-forward for each it is given
HEAD = 32  # channels of a head


@dataclass(frozen=True)
class LevelSizes:
    """One level of an encoder or decoder, the outermost first.

    Attributes:
        width: Channels.
        layers: Blocks.
        kernels: Reaches of the attention beside that of single cells; None: blocks are residual
            convolutions.
    """

    width: int
    layers: int
    kernels: tuple[int, ...] | None = None


@dataclass(frozen=True)
class DCAESizes:
    """Sizes of one autoencoder.

    Attributes:
        channels: Of a picture (a spectrogram for each ear).
        latent: Channels of a latent.
        encoder, decoder: Levels.
        head: Channels of a head.
        unshuffles, shuffles: Whether convolutions between levels change sizes by regrouping cells,
            going in and out; otherwise by stride 2, and by doubling cells before.
    """

    channels: int
    latent: int
    encoder: tuple[LevelSizes, ...]
    decoder: tuple[LevelSizes, ...]
    head: int = HEAD
    unshuffles: bool = False
    shuffles: bool = False


class ChannelNorm(nn.Module):
    """Divides ``x [B, C, ...]`` by its quadratic mean over the channels."""

    def __init__(self, width: int, **place: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, **place))
        self.bias = nn.Parameter(torch.empty(width, **place))

    def forward(self, x: Tensor) -> Tensor:
        out = rms_norm(x.movedim(1, -1), self.weight.to(x), NORM_EPS) + self.bias.to(x)
        return out.movedim(-1, 1)


class ResBlock(nn.Module):
    """Two convolutions, and what it is given."""

    def __init__(self, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.conv1 = operations.Conv2d(width, width, 3, padding=1, **place)
        self.conv2 = operations.Conv2d(width, width, 3, padding=1, bias=False, **place)
        self.norm = ChannelNorm(width, **place)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv2(F.silu(self.conv1(x))))


class Reach(nn.Module):
    """Queries, keys and values of a cell's neighbourhood."""

    def __init__(self, width: int, head: int, kernel: int, operations: Any, **place: Any) -> None:
        super().__init__()
        conv, three = operations.Conv2d, 3 * width
        self.proj_in = conv(
            three, three, kernel, padding=kernel // 2, groups=three, bias=False, **place
        )
        self.proj_out = conv(three, three, 1, groups=three // head, bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj_out(self.proj_in(x))


class MultiscaleAttention(nn.Module):
    """Attention of all cells, in which ReLU of queries and keys weighs the values."""

    def __init__(
        self, width: int, head: int, kernels: tuple[int, ...], operations: Any, **place: Any
    ) -> None:
        super().__init__()
        linear, self.head = operations.Linear, head
        self.to_q = linear(width, width, bias=False, **place)
        self.to_k = linear(width, width, bias=False, **place)
        self.to_v = linear(width, width, bias=False, **place)
        self.to_qkv_multiscale = nn.ModuleList(
            Reach(width, head, kernel, operations, **place) for kernel in kernels
        )
        self.to_out = linear(width * (1 + len(kernels)), width, bias=False, **place)
        self.norm_out = ChannelNorm(width, **place)

    def forward(self, x: Tensor) -> Tensor:
        cells = x.movedim(1, -1)
        parts = [self.to_q(cells), self.to_k(cells), self.to_v(cells)]
        qkv = torch.cat(parts, dim=-1).movedim(-1, 1)
        qkv = torch.cat([qkv, *(reach(qkv) for reach in self.to_qkv_multiscale)], dim=1)
        # Heads are cut out of q, k and v one behind the other: a head of the first reach takes
        # three neighbouring stretches of channels, whichever of the three these are.
        q, k, v = qkv.float().flatten(2).unflatten(1, (-1, 3 * self.head)).chunk(3, dim=2)
        q, k = q.relu(), k.relu()
        weighed = (v @ k.transpose(-2, -1)) @ q  # [B, heads, head, cells]
        total = k.sum(dim=-1, keepdim=True).transpose(-2, -1) @ q
        seen = (
            (weighed / (total + DIVISION_EPS)).to(x.dtype).flatten(1, 2).unflatten(2, x.shape[2:])
        )
        return x + self.norm_out(self.to_out(seen.movedim(1, -1)).movedim(-1, 1))


class GatedConvolution(nn.Module):
    """A feed-forward with a gate that sees the neighbours of a cell."""

    def __init__(self, width: int, operations: Any, **place: Any) -> None:
        super().__init__()
        conv, both = operations.Conv2d, 2 * EXPANSION * width
        self.conv_inverted = conv(width, both, 1, **place)
        self.conv_depth = conv(both, both, 3, padding=1, groups=both, **place)
        self.conv_point = conv(both // 2, width, 1, bias=False, **place)
        self.norm = ChannelNorm(width, **place)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.conv_depth(F.silu(self.conv_inverted(x)))
        value, gate = wide.chunk(2, dim=1)
        return x + self.norm(self.conv_point(value * F.silu(gate)))


class AttentionBlock(nn.Module):
    """Attention and a feed-forward."""

    def __init__(
        self, width: int, head: int, kernels: tuple[int, ...], operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.attn = MultiscaleAttention(width, head, kernels, operations, **place)
        self.conv_out = GatedConvolution(width, operations, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_out(self.attn(x))


def averaged(x: Tensor, channels: int) -> Tensor:
    """As many channels, each the mean of neighbouring ones."""
    return x.unflatten(1, (channels, -1)).mean(dim=2)


def repeated(x: Tensor, channels: int) -> Tensor:
    """As many channels: each that is given stands several times, one beside the other."""
    return x.repeat_interleave(channels // x.shape[1], dim=1)


class Down(nn.Module):
    """Half as many cells along a side, beside a path that averages regrouped channels."""

    def __init__(
        self, width: int, out: int, unshuffles: bool, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        self.out, self.unshuffles = out, unshuffles
        made, stride = (out // 4, 1) if unshuffles else (out, 2)
        self.conv = operations.Conv2d(width, made, 3, stride=stride, padding=1, **place)

    def forward(self, x: Tensor) -> Tensor:
        made = self.conv(x)
        if self.unshuffles:
            made = F.pixel_unshuffle(made, 2)
        return made + averaged(F.pixel_unshuffle(x, 2), self.out)


class Up(nn.Module):
    """Twice as many cells along a side, beside a path that regroups repeated channels."""

    def __init__(self, width: int, out: int, shuffles: bool, operations: Any, **place: Any) -> None:
        super().__init__()
        self.out, self.shuffles = out, shuffles
        made = 4 * out if shuffles else out
        self.conv = operations.Conv2d(width, made, 3, padding=1, **place)

    def forward(self, x: Tensor) -> Tensor:
        if self.shuffles:
            made = F.pixel_shuffle(self.conv(x), 2)
        else:
            made = self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return made + F.pixel_shuffle(repeated(x, 4 * self.out), 2)


def _blocks(level: LevelSizes, head: int, operations: Any, **place: Any) -> list[nn.Module]:
    kernels = level.kernels
    if kernels is None:
        return [ResBlock(level.width, operations, **place) for _ in range(level.layers)]
    return [
        AttentionBlock(level.width, head, kernels, operations, **place) for _ in range(level.layers)
    ]


class Encoder(nn.Module):
    """Pictures ``[B, C, H, W]`` to latents; sides are multiples of 2 to the levels but one."""

    def __init__(self, sizes: DCAESizes, operations: Any, **place: Any) -> None:
        super().__init__()
        levels, self.latent = sizes.encoder, sizes.latent
        conv = operations.Conv2d
        self.conv_in = conv(sizes.channels, levels[0].width, 3, padding=1, **place)
        self.down_blocks = nn.ModuleList()
        for number, level in enumerate(levels):
            blocks = _blocks(level, sizes.head, operations, **place)
            if number + 1 < len(levels):
                inner = levels[number + 1].width
                blocks.append(Down(level.width, inner, sizes.unshuffles, operations, **place))
            self.down_blocks.append(nn.Sequential(*blocks))
        self.conv_out = conv(levels[-1].width, sizes.latent, 3, padding=1, **place)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for blocks in self.down_blocks:
            x = blocks(x)
        return self.conv_out(x) + averaged(x, self.latent)


class Decoder(nn.Module):
    """Latents ``[B, c, h, w]`` to pictures."""

    def __init__(self, sizes: DCAESizes, operations: Any, **place: Any) -> None:
        super().__init__()
        levels, conv = sizes.decoder, operations.Conv2d
        self.width = levels[-1].width
        self.conv_in = conv(sizes.latent, self.width, 3, padding=1, **place)
        self.up_blocks = nn.ModuleList()
        for number, level in enumerate(levels):
            blocks = _blocks(level, sizes.head, operations, **place)
            if number + 1 < len(levels):
                inner = levels[number + 1].width
                blocks.insert(0, Up(inner, level.width, sizes.shuffles, operations, **place))
            self.up_blocks.append(nn.Sequential(*blocks))
        self.norm_out = ChannelNorm(levels[0].width, **place)
        self.conv_out = conv(levels[0].width, sizes.channels, 3, padding=1, **place)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z) + repeated(z, self.width)
        for blocks in reversed(self.up_blocks):
            x = blocks(x)
        return self.conv_out(self.norm_out(x).relu())


class DCAE(nn.Module):
    """The encoder and the decoder."""

    def __init__(self, sizes: DCAESizes, operations: Any, **place: Any) -> None:
        super().__init__()
        self.encoder = Encoder(sizes, operations, **place)
        self.decoder = Decoder(sizes, operations, **place)
