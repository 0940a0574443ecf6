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
from comfy.ldm.wan.vae_layers import (  # noqa: F401 - packs look here for the layers
    AttentionBlock,
    Builder,
    CausalConv3d,
    DownLevel,
    Downsample,
    Past,
    ResidualBlock,
    RMS_norm,
    UpLevel,
    Upsample,
    _conv,
    causal,
)

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
    return nn.Sequential(
        RMS_norm(width, images=False, **build.place), nn.SiLU(), _conv(width, out, (3, 3, 3), build)
    )


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
