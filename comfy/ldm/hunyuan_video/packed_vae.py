"""The autoencoders of HunyuanImage 2.1 and HunyuanVideo 1.5 (also of the picture refiner): blocks
of cells become channels and back, beside a shortcut that averages or repeats channels.

Keys follow the published files, in which levels of the decoder count from the coarsest.
Source: https://arxiv.org/abs/2410.10733 (such shortcuts), https://arxiv.org/abs/2511.18870.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.autoencoder.kl import DiagonalGaussianDistribution
from comfy.ldm.autoencoder.layers import AttnBlock as PictureAttnBlock
from comfy.ldm.autoencoder.layers import LayerMaker, Level, ResnetBlock, nonlinearity, through
from comfy.ldm.hunyuan_video.vae import AttnBlock, VideoMaker
from comfy.ldm.wan.vae_layers import RMS_norm

PLANE = 4  # cells of a plane that become one


@dataclass(frozen=True)
class PackedConfig:
    """Sizes of one autoencoder.

    Attributes:
        widths: Channels of each level, the finest first; each but the last halves the size.
        blocks: Residual blocks per level of the encoder (the decoder has one more).
        z_channels: Latent channels.
        halves_time: For each step to a coarser level whether frames are halved, too; None for
            pictures.
        norm_num_groups: Groups of every norm, of pictures.
    """

    widths: Sequence[int]
    blocks: int
    z_channels: int
    halves_time: Sequence[bool] | None = None
    norm_num_groups: int = 32

    def __post_init__(self) -> None:
        if self.widths[-1] % (2 * self.z_channels):
            raise ValueError(
                f"width {self.widths[-1]} is not a multiple of both halves of the latent's "
                f"{self.z_channels} channels"
            )

    def steps(self) -> list[int]:
        """How many frames become one, at each step to a coarser level."""
        return [2 if halves else 1 for halves in self.halves_time or [False] * len(self.widths)]


@dataclass(frozen=True)
class RMSVideoMaker(VideoMaker):
    """Makes layers over frames with norms that divide by the root mean square."""

    def norm(self, channels: int) -> nn.Module:
        return RMS_norm(channels, images=False, dtype=self.dtype, device=self.device)


def _attention(width: int, make: LayerMaker) -> nn.Module:
    if isinstance(make, VideoMaker):
        return AttnBlock(width, make)
    return PictureAttnBlock(width, make)


def packed(x: Tensor, time: int = 1) -> Tensor:
    """``[B, C, T, H, W]`` to ``[B, time * 4 * C, T / time, H / 2, W / 2]``."""
    cells = x.unflatten(4, (-1, 2)).unflatten(3, (-1, 2)).unflatten(2, (-1, time))
    return cells.permute(0, 3, 5, 7, 1, 2, 4, 6).flatten(1, 4)


def unpacked(x: Tensor, time: int = 1) -> Tensor:
    """The inverse of `packed`."""
    cells = x.unflatten(1, (time, 2, 2, -1))
    return cells.permute(0, 4, 5, 1, 6, 2, 7, 3).flatten(6, 7).flatten(4, 5).flatten(2, 3)


def _averaged(x: Tensor, channels: int) -> Tensor:
    return x.unflatten(1, (channels, -1)).mean(dim=2)


class Downsample(nn.Module):
    """Half the height and width, and all frames but the first too where told."""

    def __init__(self, channels: int, out: int, time: int, make: LayerMaker) -> None:
        super().__init__()
        self.time, self.out = time, out
        self.conv = make.conv(channels, out // (PLANE * time), 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        if x.ndim == 4:
            return self._joined(h[:, :, None], x[:, :, None], 1)[:, :, 0]
        if self.time == 1:
            return self._joined(h, x, 1)
        first = self._joined(h[:, :, :1], x[:, :, :1], 1)
        rest = self._joined(h[:, :, 1:], x[:, :, 1:], self.time)
        return torch.cat([first, rest], dim=2)

    def _joined(self, h: Tensor, x: Tensor, time: int) -> Tensor:
        made = packed(h, time)
        if made.shape[1] < self.out:  # the first frame stands for those before it
            made = torch.cat([made] * (self.out // made.shape[1]), dim=1)
        return made + _averaged(packed(x, time), self.out)


class Upsample(nn.Module):
    """Twice the height and width, and all frames but the first too where told."""

    def __init__(self, channels: int, out: int, time: int, make: LayerMaker) -> None:
        super().__init__()
        self.time, self.out = time, out
        self.conv = make.conv(channels, out * PLANE * time, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        if x.ndim == 4:
            return self._joined(h[:, :, None], x[:, :, None], 1)[:, :, 0]
        if self.time == 1:
            return self._joined(h, x, 1)
        first = self._joined(h[:, :, :1], x[:, :, :1], 1)
        rest = self._joined(h[:, :, 1:], x[:, :, 1:], self.time)
        return torch.cat([first, rest], dim=2)

    def _joined(self, h: Tensor, x: Tensor, time: int) -> Tensor:
        made, kept = unpacked(h, time)[:, : self.out], unpacked(x, time)
        return made + kept.repeat_interleave(self.out // kept.shape[1], dim=1)


class _Level(Level):
    """Residual blocks of one size, then resampling."""

    def __init__(self, width: int, count: int, make: LayerMaker) -> None:
        super().__init__()
        self.block = nn.ModuleList(ResnetBlock(in_channels=width, make=make) for _ in range(count))


class _Middle(nn.Module):
    """Residual block, attention, residual block."""

    def __init__(self, width: int, make: LayerMaker) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(in_channels=width, make=make)
        self.attn_1 = _attention(width, make)
        self.block_2 = ResnetBlock(in_channels=width, make=make)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    """Picture or video in -1..1 to moments."""

    def __init__(self, config: PackedConfig, make: LayerMaker) -> None:
        super().__init__()
        widths = list(config.widths)
        self.moments = 2 * config.z_channels
        self.conv_in = make.conv(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList(_Level(width, config.blocks, make) for width in widths)
        for level, width, finer, time in zip(self.down, widths[1:], widths, config.steps()):
            level.downsample = Downsample(finer, width, time, make)
        self.mid = _Middle(widths[-1], make)
        self.norm_out = make.norm(widths[-1])
        self.conv_out = make.conv(widths[-1], self.moments, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = through(self.down, self.conv_in(x))
        h = self.mid(h)
        return self.conv_out(nonlinearity(self.norm_out(h))) + _averaged(h, self.moments)


class Decoder(nn.Module):
    """Latent to picture or video, about -1..1."""

    def __init__(self, config: PackedConfig, make: LayerMaker) -> None:
        super().__init__()
        widths = list(config.widths)[::-1]
        steps = config.steps()[: len(widths) - 1][::-1]
        self.repeats = widths[0] // config.z_channels
        self.conv_in = make.conv(config.z_channels, widths[0], 3, padding=1)
        self.mid = _Middle(widths[0], make)
        self.up = nn.ModuleList(_Level(width, config.blocks + 1, make) for width in widths)
        for level, width, coarser, time in zip(self.up, widths[1:], widths, steps):
            level.upsample = Upsample(coarser, width, time, make)
        self.norm_out = make.norm(widths[-1])
        self.conv_out = make.conv(widths[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        h = through(self.up, self.mid(self.conv_in(z) + z.repeat_interleave(self.repeats, dim=1)))
        return self.conv_out(nonlinearity(self.norm_out(h)))


class PackedVAE(nn.Module):
    """Encoder and decoder of pictures ``[B, 3, H, W]``, or of videos ``[B, 3, T, H, W]``."""

    def __init__(
        self,
        config: PackedConfig,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.config = config
        kind = LayerMaker if config.halves_time is None else RMSVideoMaker
        make = kind(operations, config.norm_num_groups, dtype, device)
        self.encoder, self.decoder = Encoder(config, make), Decoder(config, make)

    def encode(self, x: Tensor) -> Tensor:
        """The mean latent; of a video frames beyond a multiple of what a cell stands for, and one,
        are left out."""
        if x.ndim == 5:
            step = 2 ** sum(self.config.halves_time or ())
            x = x[:, :, : (x.shape[2] - 1) // step * step + 1]
        return DiagonalGaussianDistribution(self.encoder(x)).mode()

    def decode(self, z: Tensor, **_: Any) -> Tensor:
        """Picture or video of a latent, about -1..1."""
        return self.decoder(z)
