"""The autoencoders of Wan 2.1 and 2.2: video to latents, four frames to one, the first alone.

All convolutions along time look back only, so a video is coded piece by piece: each layer keeps
the last frames that it saw (`Past`). Pieces are the first frame, then four frames (one latent
frame) each; the result is that of the whole at once.
Source: https://github.com/Wan-Video/Wan2.1, https://github.com/Wan-Video/Wan2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.nn import attention

FRAMES = 4  # of a video for a latent frame


@dataclass(frozen=True)
class WanVAEConfig:
    """Sizes of an autoencoder.

    Attributes:
        dim, decoder_dim: Width at the finest level of encoder and decoder.
        dim_mult: Multiples of it at each level, from fine to coarse.
        temporal: After which levels of the encoder time is halved.
        image_channels: Channels of a picture.
        patch: Side of a square of pixels that is taken as one (Wan 2.2).
        has_shortcuts: Whether levels are bridged by means of their input (Wan 2.2).
    """

    dim: int = 96
    decoder_dim: int = 96
    z_dim: int = 16
    dim_mult: Sequence[int] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal: Sequence[bool] = (False, True, True)
    image_channels: int = 3
    patch: int = 1
    has_shortcuts: bool = False

    def __post_init__(self) -> None:
        if len(self.temporal) != len(self.dim_mult) - 1:
            raise ValueError(
                f"{len(self.dim_mult)} levels need {len(self.dim_mult) - 1} statements about time, "
                f"found {len(self.temporal)}"
            )


class Past:
    """What each layer saw last, while a video is coded piece by piece."""

    def __init__(self) -> None:
        self.is_first = True
        self._frames: dict[nn.Module, Tensor] = {}

    def before(self, layer: nn.Module, x: Tensor, count: int) -> Tensor | None:
        """The last ``count`` frames of a layer before ``x``, or None; those of ``x`` are kept."""
        earlier = self._frames.get(layer)
        known = x if earlier is None else torch.cat([earlier, x[:, :, -count:]], dim=2)
        self._frames[layer] = known[:, :, -count:].clone()
        return earlier


def causal(layer: nn.Module, x: Tensor, past: Past) -> Tensor:
    """A convolution of three frames, whose padding along time is what came before (else zeros)."""
    frames = _last_size(layer)
    if frames == 1:
        return layer(x)
    earlier = past.before(layer, x, frames - 1)
    missing = frames - 1 - (0 if earlier is None else earlier.shape[2])
    if earlier is not None:
        x = torch.cat([earlier.to(x), x], dim=2)
    return layer(functional.pad(x, (0, 0, 0, 0, missing, 0)))


def _last_size(layer: nn.Module) -> int:
    size: Any = layer.kernel_size
    return int(size[0])


@dataclass(frozen=True)
class Builder:
    """Of what and where layers are made."""

    operations: Any
    place: dict[str, Any]


def _conv(channels: int, out: int, size: Sequence[int], build: Builder, **options: Any) -> Any:
    """A convolution that pads rows and columns to keep their size."""
    padding = (0, size[1] // 2, size[2] // 2)
    return build.operations.Conv3d(channels, out, size, padding=padding, **options, **build.place)


class RMSNorm(nn.Module):
    """Channels to length one, times the root of their number and a weight."""

    def __init__(self, dim: int, build: Builder, is_picture: bool = False) -> None:
        super().__init__()
        shape = (dim, 1, 1) if is_picture else (dim, 1, 1, 1)
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.empty(shape, **build.place))

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=1) * self.scale * self.gamma.to(x)


class ResidualBlock(nn.Module):
    """Two norms, activations and convolutions, and a way around them."""

    def __init__(self, channels: int, out: int, build: Builder) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            RMSNorm(channels, build),
            nn.SiLU(),
            _conv(channels, out, (3, 3, 3), build),
            RMSNorm(out, build),
            nn.SiLU(),
            nn.Identity(),
            _conv(out, out, (3, 3, 3), build),
        )
        self.shortcut: nn.Module = nn.Identity()
        if channels != out:
            self.shortcut = _conv(channels, out, (1, 1, 1), build)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        first, second = self.residual[2], self.residual[6]
        h = causal(first, functional.silu(self.residual[0](x)), past)
        h = causal(second, functional.silu(self.residual[3](h)), past)
        return h + self.shortcut(x)


class AttentionBlock(nn.Module):
    """Attention among the positions of each frame, with one head."""

    def __init__(self, dim: int, build: Builder) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, build, is_picture=True)
        self.to_qkv = build.operations.Conv2d(dim, dim * 3, 1, **build.place)
        self.proj = build.operations.Conv2d(dim, dim, 1, **build.place)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        del past
        frames = rearrange(x, "b c t h w -> (b t) c h w")
        qkv = self.to_qkv(self.norm(frames)).flatten(2).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=-1)
        seen = attention.optimized_attention(q.contiguous(), k.contiguous(), v.contiguous(), 1)
        seen = self.proj(seen.transpose(1, 2).reshape(frames.shape))
        return x + rearrange(seen, "(b t) c h w -> b c t h w", b=x.shape[0])


class Upsample(nn.Module):
    """Rows and columns doubled; with ``temporal`` frames too, but the first."""

    def __init__(self, dim: int, out: int, temporal: bool, build: Builder) -> None:
        super().__init__()
        conv = build.operations.Conv2d(dim, out, 3, padding=1, **build.place)
        self.resample = nn.Sequential(nn.Identity(), conv)
        self.time_conv: nn.Module | None = None
        if temporal:
            self.time_conv = _conv(dim, dim * 2, (3, 1, 1), build)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        if self.time_conv is not None and not past.is_first:
            pairs = causal(self.time_conv, x, past)
            x = rearrange(pairs, "b (two c) t h w -> b c (t two) h w", two=2)
        frames = rearrange(x, "b c t h w -> (b t) c h w")
        large = functional.interpolate(frames, scale_factor=2.0, mode="nearest-exact")
        return rearrange(self.resample(large), "(b t) c h w -> b c t h w", b=x.shape[0])


class Downsample(nn.Module):
    """Rows and columns halved; with ``temporal`` frames too, but the first."""

    def __init__(self, dim: int, temporal: bool, build: Builder) -> None:
        super().__init__()
        conv = build.operations.Conv2d(dim, dim, 3, stride=2, **build.place)
        self.resample = nn.Sequential(nn.Identity(), conv)
        self.time_conv: nn.Module | None = None
        if temporal:
            self.time_conv = _conv(dim, dim, (3, 1, 1), build, stride=(2, 1, 1))

    def forward(self, x: Tensor, past: Past) -> Tensor:
        frames = functional.pad(rearrange(x, "b c t h w -> (b t) c h w"), (0, 1, 0, 1))
        x = rearrange(self.resample(frames), "(b t) c h w -> b c t h w", b=x.shape[0])
        if self.time_conv is None:
            return x
        earlier = past.before(self.time_conv, x, 1)
        return x if earlier is None else self.time_conv(torch.cat([earlier, x], dim=2))


class DownLevel(nn.Module):
    """A level of Wan 2.2's encoder; means of its input go around it."""

    def __init__(
        self, channels: int, out: int, blocks: int, down: bool, temporal: bool, build: Builder
    ) -> None:
        super().__init__()
        self.out, self.time, self.space = out, 2 if temporal else 1, 2 if down else 1
        layers: list[nn.Module] = [
            ResidualBlock(channels if number == 0 else out, out, build) for number in range(blocks)
        ]
        if down:
            layers.append(Downsample(out, temporal, build))
        self.downsamples = nn.ModuleList(layers)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        around = functional.pad(x, (0, 0, 0, 0, -x.shape[2] % self.time, 0))
        around = rearrange(
            around, "b c (t r) (h p) (w q) -> b (c r p q) t h w",
            r=self.time, p=self.space, q=self.space,
        )  # fmt: skip
        around = around.unflatten(1, (self.out, -1)).mean(dim=2)
        for layer in self.downsamples:
            x = layer(x, past)
        return x + around


class UpLevel(nn.Module):
    """A level of Wan 2.2's decoder; repetitions of its input go around it."""

    def __init__(
        self, channels: int, out: int, blocks: int, up: bool, temporal: bool, build: Builder
    ) -> None:
        super().__init__()
        self.out, self.time, self.up = out, 2 if temporal else 1, up
        layers: list[nn.Module] = [
            ResidualBlock(channels if number == 0 else out, out, build) for number in range(blocks)
        ]
        if up:
            layers.append(Upsample(out, out, temporal, build))
        self.upsamples = nn.ModuleList(layers)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        whole = x
        for layer in self.upsamples:
            x = layer(x, past)
        if not self.up:
            return x
        cells = self.time * 4
        around = whole.repeat_interleave(self.out * cells // whole.shape[1], dim=1)
        around = rearrange(
            around, "b (c r p q) t h w -> b c (t r) (h p) (w q)", r=self.time, p=2, q=2
        )
        if past.is_first:
            around = around[:, :, self.time - 1 :]
        return x + around


class Encoder(nn.Module):
    """A piece of a video to the moments of its latents."""

    def __init__(self, config: WanVAEConfig, build: Builder) -> None:
        super().__init__()
        widths = [config.dim * multiple for multiple in (1, *config.dim_mult)]
        channels = config.image_channels * config.patch**2
        self.conv1 = _conv(channels, widths[0], (3, 3, 3), build)
        layers: list[nn.Module] = []
        last = len(config.dim_mult) - 1
        for level, (width, out) in enumerate(pairwise(widths)):
            down = level < last
            temporal = down and config.temporal[level]
            blocks = config.num_res_blocks
            if config.has_shortcuts:
                layers.append(DownLevel(width, out, blocks, down, temporal, build))
                continue
            layers += [
                ResidualBlock(width if number == 0 else out, out, build) for number in range(blocks)
            ]
            if down:
                layers.append(Downsample(out, temporal, build))
        self.downsamples = nn.ModuleList(layers)
        self.middle = _middle(widths[-1], build)
        self.head = _head(widths[-1], config.z_dim * 2, build)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        x = causal(self.conv1, x, past)
        for layer in (*self.downsamples, *self.middle):
            x = layer(x, past)
        return causal(self.head[2], functional.silu(self.head[0](x)), past)


class Decoder(nn.Module):
    """A latent frame to a piece of a video."""

    def __init__(self, config: WanVAEConfig, build: Builder) -> None:
        super().__init__()
        multiples = list(reversed(config.dim_mult))
        widths = [config.decoder_dim * multiple for multiple in (multiples[0], *multiples)]
        self.conv1 = _conv(config.z_dim, widths[0], (3, 3, 3), build)
        self.middle = _middle(widths[0], build)
        layers: list[nn.Module] = []
        times = [*reversed(config.temporal), False]
        blocks = config.num_res_blocks + 1
        for level, (width, out) in enumerate(pairwise(widths)):
            up = level < len(multiples) - 1
            if config.has_shortcuts:
                layers.append(UpLevel(width, out, blocks, up, times[level], build))
                continue
            if level > 0:  # upsampling has halved the channels
                width //= 2
            layers += [
                ResidualBlock(width if number == 0 else out, out, build) for number in range(blocks)
            ]
            if up:
                layers.append(Upsample(out, out // 2, times[level], build))
        self.upsamples = nn.ModuleList(layers)
        self.head = _head(widths[-1], config.image_channels * config.patch**2, build)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        x = causal(self.conv1, x, past)
        for layer in (*self.middle, *self.upsamples):
            x = layer(x, past)
        return causal(self.head[2], functional.silu(self.head[0](x)), past)


def _middle(width: int, build: Builder) -> nn.ModuleList:
    return nn.ModuleList(
        [
            ResidualBlock(width, width, build),
            AttentionBlock(width, build),
            ResidualBlock(width, width, build),
        ]
    )


def _head(width: int, out: int, build: Builder) -> nn.Sequential:
    return nn.Sequential(RMSNorm(width, build), nn.SiLU(), _conv(width, out, (3, 3, 3), build))


class WanVAE(nn.Module):
    """Encodes and decodes videos ``[B, C, T, H, W]`` in -1..1.

    Args:
        dec_dim: Width of the decoder, if not that of the encoder.
        temperal_downsample: After which levels of the encoder time is halved.
    """

    def __init__(
        self,
        dim: int = 96,
        z_dim: int = 16,
        dim_mult: Sequence[int] = (1, 2, 4, 4),
        num_res_blocks: int = 2,
        temperal_downsample: Sequence[bool] = (False, True, True),
        image_channels: int = 3,
        dec_dim: int | None = None,
        patch: int = 1,
        has_shortcuts: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        **_: Any,
    ) -> None:
        super().__init__()
        config = WanVAEConfig(
            dim, dec_dim or dim, z_dim, tuple(dim_mult), num_res_blocks,
            tuple(temperal_downsample), image_channels, patch, has_shortcuts,
        )  # fmt: skip
        build = Builder(operations, {"dtype": dtype, "device": device})
        self.config, self.z_dim = config, config.z_dim
        self.encoder = Encoder(config, build)
        self.conv1 = _conv(config.z_dim * 2, config.z_dim * 2, (1, 1, 1), build)
        self.conv2 = _conv(config.z_dim, config.z_dim, (1, 1, 1), build)
        self.decoder = Decoder(config, build)

    def encode(self, x: Tensor) -> Tensor:
        """Means of the latents ``[B, z, 1 + (T - 1) // 4, h, w]``; frames over are left out."""
        p = self.config.patch
        x = rearrange(x, "b c t (h q) (w r) -> b (c r q) t h w", q=p, r=p)
        past = Past()
        pieces = [self.encoder(x[:, :, :1], past)]
        past.is_first = False
        for start in range(1, x.shape[2] - FRAMES + 1, FRAMES):
            pieces.append(self.encoder(x[:, :, start : start + FRAMES], past))
        return self.conv1(torch.cat(pieces, dim=2)).chunk(2, dim=1)[0]

    def decode(self, z: Tensor) -> Tensor:
        """The video ``[B, C, 1 + 4 (t - 1), H, W]`` of latents ``[B, z, t, h, w]``."""
        z = self.conv2(z)
        past = Past()
        out: Tensor | None = None
        place = 0
        for frame in z.split(1, dim=2):
            piece = self._pixels(self.decoder(frame, past))
            past.is_first = False
            if out is None:
                length = 1 + (z.shape[2] - 1) * FRAMES
                out = piece.new_empty((*piece.shape[:2], length, *piece.shape[3:]))
            out[:, :, place : place + piece.shape[2]] = piece
            place += piece.shape[2]
        assert out is not None
        return out[:, :, :place]

    def _pixels(self, piece: Tensor) -> Tensor:
        p = self.config.patch
        return rearrange(piece, "b (c r q) t h w -> b c t (h q) (w r)", q=p, r=p)
