"""The video autoencoder of Cosmos 1: eight frames, rows and columns to a cell, the first frame
alone.

Pixels are first split into means and differences of 4 x 4 x 4 (Haar wavelets); convolutions are
split into one over rows and columns and one over frames, which looks back only. Keys follow the
published file.
Source: Agarwal et al. 2025, https://arxiv.org/abs/2501.03575, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.autoencoder.layers import Level, nonlinearity, through
from comfy.nn import attention

NORM_EPS = 1e-6
SIGMA = 0.5  # standard deviation of the latents that the networks were made for
AVERAGED = 16  # frames of a latent for which means and deviations are known, one by one


@dataclass(frozen=True)
class CosmosVAEConfig:
    """Sizes of an autoencoder.

    Attributes:
        encoder, decoder: Width at the entrance, then of each level, in the order of the files.
        blocks: Residual blocks of a level of the encoder.
        halved: How many levels halve all sizes, from the finest.
        halvings: How often the wavelets halve them.
    """

    encoder: tuple[int, ...] = (128, 256, 512, 512)
    decoder: tuple[int, ...] = (512, 256, 512, 512)
    blocks: int = 2
    halved: int = 1
    halvings: int = 2
    z_channels: int = 16
    image_channels: int = 3

    @property
    def ratio(self) -> int:
        """Frames, rows or columns of a cell."""
        return int(2 ** (self.halved + self.halvings))


@dataclass(frozen=True)
class Maker:
    """Makes layers of one kind."""

    operations: Any = ops.disable_weight_init
    dtype: Any = None
    device: Any = None

    @property
    def place(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device}


def split_by_haar(x: Tensor) -> Tensor:
    """``[B, C, T, H, W]`` to means and differences ``[B, 8 C, T / 2, H / 2, W / 2]``; an odd size
    is filled up with the last but one.
    """
    odd = [size % 2 for size in x.shape[:1:-1]]
    if any(odd):
        x = F.pad(x, [side for size in odd for side in (0, size)], mode="reflect")
    x = rearrange(x, "b c (t u) (h v) (w z) -> b c t h w u v z", u=2, v=2, z=2)
    for axis in (5, 6, 7):
        first, second = x.unbind(axis)
        x = torch.stack([first + second, first - second], dim=axis)
    return rearrange(x, "b c t h w u v z -> b (u v z c) t h w") / 8


def join_by_haar(x: Tensor) -> Tensor:
    """Inverse of `split_by_haar`."""
    x = rearrange(x, "b (u v z c) t h w -> b c t h w u v z", u=2, v=2, z=2)
    for axis in (5, 6, 7):
        mean, difference = x.unbind(axis)
        x = torch.stack([mean + difference, mean - difference], dim=axis)
    return rearrange(x, "b c t h w u v z -> b c (t u) (h v) (w z)")


class CausalConv3d(nn.Module):
    """A convolution that repeats the first frame before it; borders around it are zero."""

    def __init__(
        self, channels: int, out: int, kernel: Sequence[int], make: Maker, stride: Any = 1
    ) -> None:
        super().__init__()
        strides = (stride,) * 3 if isinstance(stride, int) else tuple(stride)
        self.earlier = max(0, kernel[0] - strides[0])
        # Where the size is halved, what calls it has padded it.
        border = [0 if step > 1 else size // 2 for size, step in zip(kernel[1:], strides[1:])]
        self.conv3d = make.operations.Conv3d(
            channels, out, kernel, stride=strides, padding=(0, *border), **make.place
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.earlier:
            x = torch.cat([x[:, :, :1].expand(-1, -1, self.earlier, -1, -1), x], dim=2)
        return self.conv3d(x)


def split_conv(channels: int, out: int, make: Maker) -> nn.Sequential:
    """A convolution over rows and columns, then one over frames."""
    return nn.Sequential(
        CausalConv3d(channels, out, (1, 3, 3), make), CausalConv3d(out, out, (3, 1, 1), make)
    )


class Norm(nn.Module):
    """Each frame over all its channels and cells."""

    def __init__(self, width: int, make: Maker) -> None:
        super().__init__()
        self.norm = make.operations.GroupNorm(1, width, eps=NORM_EPS, **make.place)

    def forward(self, x: Tensor) -> Tensor:
        frames = self.norm(rearrange(x, "b c t h w -> (b t) c h w"))
        return rearrange(frames, "(b t) c h w -> b c t h w", b=x.shape[0])


class ResnetBlock(nn.Module):
    """Two norms and convolutions around a residual connection."""

    def __init__(self, channels: int, out: int, make: Maker) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(channels, make), Norm(out, make)
        self.conv1, self.conv2 = split_conv(channels, out, make), split_conv(out, out, make)
        self.nin_shortcut: nn.Module = nn.Identity()
        if channels != out:
            self.nin_shortcut = CausalConv3d(channels, out, (1, 1, 1), make)

    def forward(self, x: Tensor) -> Tensor:
        # In one expression: features without a name are freed as soon as they were read.
        h = self.conv2(nonlinearity(self.norm2(self.conv1(nonlinearity(self.norm1(x))))))
        return h.add_(self.nin_shortcut(x))


class AttnBlock(nn.Module):
    """Self-attention among the cells of each frame, with a residual connection."""

    def __init__(self, width: int, make: Maker) -> None:
        super().__init__()
        self.norm = Norm(width, make)
        self.q, self.k, self.v, self.proj_out = (
            CausalConv3d(width, width, (1, 1, 1), make) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        frames, rows = x.shape[2:4]
        q, k, v = (
            rearrange(layer(h), "b c t h w -> (b t) (h w) c") for layer in (self.q, self.k, self.v)
        )
        seen = attention.optimized_attention(q, k, v, 1)
        back = rearrange(seen, "(b t) (h w) c -> b c t h w", t=frames, h=rows)
        return x + self.proj_out(back)


class FrameAttnBlock(AttnBlock):
    """Self-attention of each cell to itself in this frame and those before."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        frames, rows, columns = x.shape[2:]
        q, k, v = (
            rearrange(layer(h), "b c t h w -> (b h w) t c") for layer in (self.q, self.k, self.v)
        )
        hidden = torch.full((frames, frames), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        seen = attention.optimized_attention(q, k, v, 1, hidden)
        back = rearrange(seen, "(b h w) t c -> b c t h w", h=rows, w=columns)
        return x + self.proj_out(back)


class Middle(nn.Module):
    """Attention over cells and over frames, between residual blocks."""

    def __init__(self, width: int, make: Maker) -> None:
        super().__init__()
        self.block_1, self.block_2 = (
            ResnetBlock(width, width, make),
            ResnetBlock(width, width, make),
        )
        self.attn_1 = nn.Sequential(AttnBlock(width, make), FrameAttnBlock(width, make))

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


def pooled(x: Tensor, window: tuple[int, int, int]) -> Tensor:
    """Means of some frames, rows and columns; torch has none in half precision on a CPU."""
    widened = x.device.type == "cpu" and x.dtype.itemsize < torch.float32.itemsize
    return F.avg_pool3d(x.float() if widened else x, window).to(x.dtype)


class Downsample(nn.Module):
    """Halve height and width, then the frames with the first counted twice."""

    def __init__(self, width: int, make: Maker) -> None:
        super().__init__()
        self.conv1 = CausalConv3d(width, width, (1, 3, 3), make, stride=(1, 2, 2))
        self.conv2 = CausalConv3d(width, width, (3, 1, 1), make, stride=(2, 1, 1))
        self.conv3 = CausalConv3d(width, width, (1, 1, 1), make)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 1, 0, 1))
        x = self.conv1(x) + pooled(x, (1, 2, 2))
        x = torch.cat([x[:, :, :1], x], dim=2)
        return self.conv3(self.conv2(x) + pooled(x, (2, 1, 1)))


class Upsample(nn.Module):
    """Double the frames but the first, then height and width."""

    def __init__(self, width: int, make: Maker) -> None:
        super().__init__()
        self.conv1 = CausalConv3d(width, width, (3, 1, 1), make)
        self.conv2 = CausalConv3d(width, width, (1, 3, 3), make)
        self.conv3 = CausalConv3d(width, width, (1, 1, 1), make)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, :, :1], x[:, :, 1:].repeat_interleave(2, dim=2)], dim=2)
        x = self.conv1(x) + x
        x = repeat(x, "b c t h w -> b c t (h v) (w z)", v=2, z=2)
        return self.conv3(self.conv2(x) + x)


class _Level(Level):
    """Residual blocks of one size, then resampling where the level has some."""

    def __init__(self, channels: int, out: int, count: int, make: Maker) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            ResnetBlock(out if number else channels, out, make) for number in range(count)
        )


class Encoder(nn.Module):
    """Video ``[B, 3, 1 + 8 n, H, W]`` to values ``[B, z, 1 + n, H / 8, W / 8]``."""

    def __init__(self, config: CosmosVAEConfig, make: Maker) -> None:
        super().__init__()
        self.halvings = config.halvings
        widths, cell = config.encoder, 8**config.halvings
        self.conv_in = split_conv(config.image_channels * cell, widths[0], make)
        self.down = nn.ModuleList()
        for number, out in enumerate(widths[1:]):
            level = _Level(widths[number], out, config.blocks, make)
            if number < config.halved:
                level.downsample = Downsample(out, make)
            self.down.append(level)
        self.mid = Middle(widths[-1], make)
        self.norm_out = Norm(widths[-1], make)
        self.conv_out = split_conv(widths[-1], config.z_channels, make)

    def forward(self, x: Tensor) -> Tensor:
        x = through([self._split, self.conv_in, *self.down, self.mid], x)
        return self.conv_out(nonlinearity(self.norm_out(x)))

    def _split(self, x: Tensor) -> Tensor:
        first = x[:, :, :1].expand(-1, -1, 2**self.halvings - 1, -1, -1)
        x = torch.cat([first, x], dim=2)
        for _ in range(self.halvings):
            x = split_by_haar(x)
        return x


class Decoder(nn.Module):
    """Inverse of `Encoder`; its finest level is the first in files."""

    def __init__(self, config: CosmosVAEConfig, make: Maker) -> None:
        super().__init__()
        self.halvings = config.halvings
        entrance, *widths = config.decoder
        self.conv_in = split_conv(config.z_channels, entrance, make)
        self.mid = Middle(entrance, make)
        levels: list[_Level] = []
        for number, out in enumerate(widths):
            coarser = widths[number + 1] if number + 1 < len(widths) else entrance
            level = _Level(coarser, out, config.blocks + 1, make)
            if 0 < number <= config.halved:
                level.upsample = Upsample(out, make)
            levels.append(level)
        self.up = nn.ModuleList(levels)
        self.norm_out = Norm(widths[0], make)
        out_channels = config.image_channels * 8**config.halvings
        self.conv_out = split_conv(widths[0], out_channels, make)

    def forward(self, z: Tensor) -> Tensor:
        x = through([self.conv_in, self.mid, *reversed(self.up)], z)
        x = self.conv_out(nonlinearity(self.norm_out(x)))
        for _ in range(self.halvings):
            x = join_by_haar(x)
        return x[:, :, 2**self.halvings - 1 :]


class CausalContinuousVideoTokenizer(nn.Module):
    """Both halves; latents have mean 0 and deviation 0.5, frame by frame."""

    def __init__(
        self,
        config: CosmosVAEConfig | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        sizes = config or CosmosVAEConfig()
        make = Maker(operations, dtype, device)
        z = sizes.z_channels
        self.encoder, self.decoder = Encoder(sizes, make), Decoder(sizes, make)
        self.quant_conv = CausalConv3d(z, z, (1, 1, 1), make)
        self.post_quant_conv = CausalConv3d(z, z, (1, 1, 1), make)
        self.latent_mean, self.latent_std = (
            nn.Parameter(torch.empty(z * AVERAGED, dtype=dtype, device=device)) for _ in range(2)
        )

    def _known(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel and frame ``[1, z, T, 1, 1]``; they come round."""
        frames = torch.arange(z.shape[2], device=z.device) % AVERAGED
        mean, deviation = (
            values.to(z).view(1, z.shape[1], AVERAGED)[:, :, frames, None, None]
            for values in (self.latent_mean, self.latent_std)
        )
        return mean, deviation

    def encode(self, x: Tensor) -> Tensor:
        """Video in -1..1 to its latent."""
        z = self.quant_conv(self.encoder(x))
        mean, deviation = self._known(z)
        return (z - mean) / deviation * SIGMA

    def decode(self, z: Tensor) -> Tensor:
        """A latent to a video in about -1..1."""
        mean, deviation = self._known(z)
        return self.decoder(self.post_quant_conv(z / SIGMA * deviation + mean))
