"""Encoder and decoder of the KL autoencoder: residual blocks, resampling and one attention.

Keys follow the published files: ``conv_in``, ``down.N.block.M``, ``mid.block_1``, ``mid.attn_1``,
``up.N.block.M``, ``norm_out``, ``conv_out``. Norms have `norm_num_groups` groups, which shapes do
not tell; 32 unless a file says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.nn import attention
from comfy.nn.layout import features_of, prefers_channels_last, tokens_of


@dataclass(frozen=True)
class AutoencoderConfig:
    """Sizes of one autoencoder.

    Attributes:
        ch: Channels of the finest level.
        ch_mult: Channels of each level as multiples of ch; each level but the last halves the size.
        num_res_blocks: Residual blocks per level of the encoder (the decoder has one more).
        z_channels: Latent channels.
        in_channels, out_ch: Picture channels in and out.
        double_z: Whether the encoder gives mean and log-variance.
        attn_resolutions: Picture sizes with attention besides the middle, for networks of
            ``resolution``.
        norm_num_groups: Groups of every norm.
        tanh_out: Whether the decoder ends in tanh.
    """

    ch: int
    ch_mult: Sequence[int]
    num_res_blocks: int
    z_channels: int
    in_channels: int = 3
    out_ch: int = 3
    double_z: bool = True
    attn_resolutions: Sequence[int] = ()
    resolution: int = 256
    dropout: float = 0.0
    norm_num_groups: int = 32
    tanh_out: bool = False

    def __post_init__(self) -> None:
        if self.ch % self.norm_num_groups:
            raise ValueError(
                f"ch {self.ch} is not divisible into {self.norm_num_groups} norm groups"
            )

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> AutoencoderConfig:
        """From the entries of a ``ddconfig``; raises TypeError for unknown ones."""
        known = {item.name for item in fields(cls)}
        unknown = sorted(options.keys() - known)
        if unknown:
            raise TypeError(f"unknown autoencoder options: {', '.join(unknown)}")
        return cls(**options)

    @property
    def downscale_ratio(self) -> int:
        """Pixels per latent cell, along each side."""
        return 2 ** (len(self.ch_mult) - 1)


@dataclass(frozen=True)
class LayerMaker:
    """Makes layers in one place (dtype, device) with one number of norm groups."""

    operations: Any = ops.disable_weight_init
    norm_num_groups: int = 32
    dtype: Any = None
    device: Any = None

    def conv(self, channels: int, out_channels: int, kernel: int, **options: Any) -> nn.Module:
        """A convolution; ``padding`` and ``stride`` as options."""
        return self.operations.Conv2d(
            channels, out_channels, kernel, dtype=self.dtype, device=self.device, **options
        )

    def norm(self, channels: int) -> nn.Module:
        """A group norm."""
        return self.operations.GroupNorm(
            self.norm_num_groups, channels, eps=1e-6, dtype=self.dtype, device=self.device
        )


def nonlinearity(x: Tensor) -> Tensor:
    """SiLU, in place: x is always the fresh output of a norm."""
    return F.silu(x, inplace=True)


class ResnetBlock(nn.Module):
    """Two convolutions with norms before them, and a residual connection."""

    def __init__(
        self,
        *,
        in_channels: int,
        out_channels: int | None = None,
        dropout: float = 0.0,
        make: LayerMaker | None = None,
    ) -> None:
        super().__init__()
        make = make or LayerMaker()
        out_channels = in_channels if out_channels is None else out_channels
        self.in_channels, self.out_channels = in_channels, out_channels
        self.norm1 = make.norm(in_channels)
        self.conv1 = make.conv(in_channels, out_channels, 3, padding=1)
        self.norm2 = make.norm(out_channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = make.conv(out_channels, out_channels, 3, padding=1)
        if in_channels != out_channels:
            self.nin_shortcut = make.conv(in_channels, out_channels, 1)

    def forward(self, x: Tensor, temb: Tensor | None = None) -> Tensor:
        """Apply to ``x [B, C, H, W]``; ``temb`` is always None in autoencoders."""
        del temb
        # In one expression: features without a name are freed as soon as they were read.
        h = self.conv2(
            self.dropout(nonlinearity(self.norm2(self.conv1(nonlinearity(self.norm1(x))))))
        )
        return h.add_(x if self.in_channels == self.out_channels else self.nin_shortcut(x))


def vae_attention() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The attention of autoencoders: one head over all positions of ``q, k, v [B, C, H, W]``."""
    return _attend


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    height, width = q.shape[2:]
    out = attention.optimized_attention(tokens_of(q), tokens_of(k), tokens_of(v), 1)
    return features_of(out, height, width)


class AttnBlock(nn.Module):
    """Self-attention over all positions, with a residual connection."""

    def __init__(self, in_channels: int, make: LayerMaker | None = None) -> None:
        super().__init__()
        make = make or LayerMaker()
        self.in_channels = in_channels
        self.norm = make.norm(in_channels)
        self.q = make.conv(in_channels, in_channels, 1)
        self.k = make.conv(in_channels, in_channels, 1)
        self.v = make.conv(in_channels, in_channels, 1)
        self.proj_out = make.conv(in_channels, in_channels, 1)
        self.optimized_attention = vae_attention()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return self.proj_out(self.optimized_attention(self.q(h), self.k(h), self.v(h))).add_(x)


class Downsample(nn.Module):
    """Halve height and width by a strided convolution; one row and column of zeros end the
    picture."""

    def __init__(self, in_channels: int, make: LayerMaker | None = None) -> None:
        super().__init__()
        make = make or LayerMaker()
        self.conv = make.conv(in_channels, in_channels, 3, stride=2, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Double height and width by nearest neighbour, then convolve."""

    def __init__(self, in_channels: int, make: LayerMaker | None = None) -> None:
        super().__init__()
        make = make or LayerMaker()
        self.conv = make.conv(in_channels, in_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class _Middle(nn.Module):
    """Residual block, attention, residual block."""

    def __init__(self, channels: int, dropout: float, make: LayerMaker) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(in_channels=channels, dropout=dropout, make=make)
        self.attn_1 = AttnBlock(channels, make)
        self.block_2 = ResnetBlock(in_channels=channels, dropout=dropout, make=make)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Level(nn.Module):
    """Blocks of one size, each followed by an attention if there are any, then resampling.

    Whoever runs it goes through its parts, as `through` does: a call for all of them would keep
    the features that go in, twice the finest ones where a decoder is at its widest, until the last
    is done.
    """

    block: nn.ModuleList | nn.Sequential
    attn: nn.ModuleList
    downsample: nn.Module
    upsample: nn.Module

    def parts(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """What features go through, in turn."""
        attentions = getattr(self, "attn", ())
        for number, block in enumerate(self.block):
            yield block
            if attentions:
                yield attentions[number]
        for name in ("downsample", "upsample"):
            if hasattr(self, name):
                yield getattr(self, name)


def through(layers: Iterable[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    """Features after all layers and levels; x should have no other owner."""
    for layer in layers:
        for part in layer.parts() if isinstance(layer, Level) else (layer,):
            x = part(x)
    return x


class _Level(Level):
    """Residual blocks of one size, of pictures."""

    def __init__(
        self,
        channels: int,
        out_channels: int,
        count: int,
        config: AutoencoderConfig,
        make: LayerMaker,
        has_attention: bool,
    ) -> None:
        super().__init__()
        self.block, self.attn = nn.ModuleList(), nn.ModuleList()
        for number in range(count):
            self.block.append(
                ResnetBlock(
                    in_channels=channels if number == 0 else out_channels,
                    out_channels=out_channels,
                    dropout=config.dropout,
                    make=make,
                )
            )
            if has_attention:
                self.attn.append(AttnBlock(out_channels, make))


def _laid_out(x: Tensor) -> Tensor:
    """x with its channels innermost where convolutions are faster so."""
    return x.contiguous(memory_format=torch.channels_last) if prefers_channels_last(x) else x


class Encoder(nn.Module):
    """Picture ``[B, 3, H, W]`` in -1..1 to moments ``[B, 2 z, H / ratio, W / ratio]``."""

    def __init__(self, config: AutoencoderConfig, make: LayerMaker) -> None:
        super().__init__()
        self.conv_in = make.conv(config.in_channels, config.ch, 3, padding=1)
        self.down = nn.ModuleList()
        channels, size = config.ch, config.resolution
        for number, mult in enumerate(config.ch_mult):
            has_attention = size in config.attn_resolutions
            level = _Level(
                channels, config.ch * mult, config.num_res_blocks, config, make, has_attention
            )
            channels = config.ch * mult
            if number != len(config.ch_mult) - 1:
                level.downsample = Downsample(channels, make)
                size //= 2
            self.down.append(level)
        self.mid = _Middle(channels, config.dropout, make)
        self.norm_out = make.norm(channels)
        moments = 2 * config.z_channels if config.double_z else config.z_channels
        self.conv_out = make.conv(channels, moments, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = through(self.down, self.conv_in(_laid_out(x)))
        return self.conv_out(nonlinearity(self.norm_out(self.mid(h))))


class Decoder(nn.Module):
    """Latent ``[B, z, h, w]`` to picture ``[B, 3, h * ratio, w * ratio]``, about -1..1."""

    def __init__(self, config: AutoencoderConfig, make: LayerMaker) -> None:
        super().__init__()
        channels = config.ch * config.ch_mult[-1]
        size = config.resolution // config.downscale_ratio
        self.tanh_out = config.tanh_out
        self.conv_in = make.conv(config.z_channels, channels, 3, padding=1)
        self.mid = _Middle(channels, config.dropout, make)
        levels: list[nn.Module] = []
        for number in reversed(range(len(config.ch_mult))):
            width = config.ch * config.ch_mult[number]
            has_attention = size in config.attn_resolutions
            level = _Level(channels, width, config.num_res_blocks + 1, config, make, has_attention)
            channels = width
            if number:
                level.upsample = Upsample(channels, make)
                size *= 2
            levels.insert(0, level)  # keys count levels from the finest
        self.up = nn.ModuleList(levels)
        self.norm_out = make.norm(channels)
        self.conv_out = make.conv(channels, config.out_ch, 3, padding=1)

    def forward(self, z: Tensor, **_: Any) -> Tensor:
        h = through(reversed(self.up), self.mid(self.conv_in(_laid_out(z))))
        x = self.conv_out(nonlinearity(self.norm_out(h)))
        return torch.tanh(x) if self.tanh_out else x
