"""The video autoencoder of LTX video: 32 x 32 pixels of eight frames in one cell of 128 channels.

Its decoder also takes the last step of sampling in newer versions: it is told a time, and the
latent gets a little noise. What is random about it comes from a generator of its own, so that a
latent always gives the same video. Keys follow the published files, which tell the blocks.
Source: HaCohen et al. 2024, https://arxiv.org/abs/2501.00103.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.lightricks.vae.causal_conv3d import CausalConv3d
from comfy.ldm.lightricks.vae.pixel_norm import PixelNorm
from comfy.nn.timesteps import timestep_embedding

NORM_EPS = 1e-6
TIME_WAVES = 256
DECODE_TIME, DECODE_NOISE = 0.05, 0.025  # what the decoder was trained for
PATCH = 4  # pixels of a side that are channels for the network
FRAMES = 8  # of a cell
NOISE_SEED = 0
BORDERS = ("zeros", "reflect", "replicate")
Parts = dict[str, Any]
Strides = tuple[int, int, int]


@dataclass(frozen=True)
class BlockSizes:
    """One block, as its keys tell it.

    Attributes:
        kind: "res" (layers of one width), "widen" (one layer to another width), "stride" (a strided
            convolution), "pack" (cells to channels) or "unpack" (channels to cells).
        width, out: Channels before and after.
        layers: Residual layers.
        strides: Of time, height and width.
        has_time, has_noise: Whether layers are told a time, and noise is added to them.
        reduction: How many times fewer channels come out than were unpacked.
        keeps: Whether what is given is unpacked too, and added.
    """

    kind: str
    width: int
    out: int
    layers: int = 1
    strides: Strides = (1, 1, 1)
    has_time: bool = False
    has_noise: bool = False
    reduction: int = 1
    keeps: bool = False


@dataclass(frozen=True)
class LTXVConfig:
    """Sizes of one autoencoder.

    Attributes:
        encoder, decoder: Blocks of both halves.
        z_channels: Channels of a latent.
        has_time: Whether the decoder is told a time.
        causal_decoder: Whether its convolutions see the past only, as those of the encoder do.
        encoder_border, decoder_border: What convolutions see beside a frame: "zeros", or frames
            mirrored ("reflect") or continued ("replicate").
    """

    encoder: tuple[BlockSizes, ...]
    decoder: tuple[BlockSizes, ...]
    z_channels: int = 128
    has_time: bool = False
    causal_decoder: bool = False
    encoder_border: str = "zeros"
    decoder_border: str = "zeros"

    def __post_init__(self) -> None:
        for border in (self.encoder_border, self.decoder_border):
            if border not in BORDERS:
                raise ValueError(
                    f"unknown border {border!r} of convolutions; known: {', '.join(BORDERS)}"
                )


class ChannelNorm(nn.Module):
    """Layer norm over the channels of ``[B, C, T, H, W]``."""

    def __init__(self, width: int, parts: Parts) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.norm = parts["operations"].LayerNorm(width, eps=NORM_EPS, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


class TimeEmbedder(nn.Module):
    """A time ``[B]`` as ``[B, D, 1, 1, 1]``."""

    def __init__(self, width: int, parts: Parts) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        linear = parts["operations"].Linear
        layers = {
            "linear_1": linear(TIME_WAVES, width, **place),
            "linear_2": linear(width, width, **place),
        }
        self.timestep_embedder = nn.ModuleDict(layers)

    def forward(self, times: Tensor, dtype: torch.dtype) -> Tensor:
        layers: Any = self.timestep_embedder
        waves = timestep_embedding(times, TIME_WAVES).to(dtype)
        made: Tensor = layers["linear_2"](F.silu(layers["linear_1"](waves)))
        return made[:, :, None, None, None]


class ResnetBlock3D(nn.Module):
    """Two convolutions with norms before them, and a residual connection."""

    def __init__(self, sizes: BlockSizes, causal: bool, parts: Parts) -> None:
        super().__init__()
        width, out, place = sizes.width, sizes.out, _place(parts)
        self.conv1 = CausalConv3d(width, out, causal=causal, **parts)
        self.conv2 = CausalConv3d(out, out, causal=causal, **parts)
        self.norm1, self.norm2 = PixelNorm(), PixelNorm()
        self.norm3: nn.Module = nn.Identity()
        self.conv_shortcut: nn.Module = nn.Identity()
        if width != out:
            self.norm3 = ChannelNorm(width, parts)
            self.conv_shortcut = parts["operations"].Conv3d(width, out, 1, **place)
        self.scale_shift_table: nn.Parameter | None = None
        if sizes.has_time:
            self.scale_shift_table = nn.Parameter(torch.empty(4, width, **place))
        self.has_noise = sizes.has_noise
        if sizes.has_noise:
            self.per_channel_scale1 = nn.Parameter(torch.empty(out, 1, 1, **place))
            self.per_channel_scale2 = nn.Parameter(torch.empty(out, 1, 1, **place))

    def forward(self, x: Tensor, time: Tensor | None, noise: torch.Generator) -> Tensor:
        mods: Sequence[Tensor | None] = (None,) * 4
        if self.scale_shift_table is not None and time is not None:
            table = self.scale_shift_table.to(x)[None, :, :, None, None, None]
            mods = (table + time.unflatten(1, (4, -1))).unbind(1)
        h = self.conv1(F.silu(_modulated(self.norm1(x), mods[0], mods[1])))
        if self.has_noise:
            h = h + _noise(h, self.per_channel_scale1, noise)
        h = self.conv2(F.silu(_modulated(self.norm2(h), mods[2], mods[3])))
        if self.has_noise:
            h = h + _noise(h, self.per_channel_scale2, noise)
        return self.conv_shortcut(self.norm3(x)) + h


def _modulated(x: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    return x if shift is None or scale is None else x * (1 + scale) + shift


def _noise(x: Tensor, scale: Tensor, generator: torch.Generator) -> Tensor:
    """The same noise in all frames, as strong as each channel has it."""
    made = torch.randn(x.shape[-2:], generator=generator).to(x)
    return (made * scale.to(x))[None, :, None]


class Residuals(nn.Module):
    """Residual layers of one width."""

    def __init__(self, sizes: BlockSizes, causal: bool, parts: Parts) -> None:
        super().__init__()
        self.res_blocks = nn.ModuleList(
            ResnetBlock3D(sizes, causal, parts) for _ in range(sizes.layers)
        )
        self.time_embedder: TimeEmbedder | None = None
        if sizes.has_time:
            self.time_embedder = TimeEmbedder(4 * sizes.width, parts)

    def forward(self, x: Tensor, times: Tensor | None, noise: torch.Generator) -> Tensor:
        time = None
        if self.time_embedder is not None and times is not None:
            time = self.time_embedder(times, x.dtype)
        for block in self.res_blocks:
            x = block(x, time, noise)
        return x


class Widen(ResnetBlock3D):
    """One residual layer to another width."""


class Stride(CausalConv3d):
    """A strided convolution."""

    def __init__(self, sizes: BlockSizes, causal: bool, parts: Parts) -> None:
        super().__init__(sizes.width, sizes.out, stride=sizes.strides, causal=causal, **parts)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        return super().forward(x)


class Pack(nn.Module):
    """Neighbouring cells become channels of one, beside their mean."""

    def __init__(self, sizes: BlockSizes, causal: bool, parts: Parts) -> None:
        super().__init__()
        self.strides, self.out = sizes.strides, sizes.out
        count = math.prod(sizes.strides)
        self.conv = CausalConv3d(sizes.width, sizes.out // count, causal=causal, **parts)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        x = torch.cat([x[:, :, : self.strides[0] - 1], x], dim=2)
        mean = _packed(x, self.strides).unflatten(1, (self.out, -1)).mean(dim=2)
        return _packed(self.conv(x), self.strides) + mean


class Unpack(nn.Module):
    """Channels of a cell become neighbouring cells, beside what was given where told."""

    def __init__(self, sizes: BlockSizes, causal: bool, parts: Parts) -> None:
        super().__init__()
        self.strides, self.reduction = sizes.strides, sizes.reduction
        self.keeps = sizes.keeps
        made = sizes.width * math.prod(sizes.strides) // sizes.reduction
        self.conv = CausalConv3d(sizes.width, made, causal=causal, **parts)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        first = self.strides[0] - 1  # stands for one frame, not for all of a cell
        made = _unpacked(self.conv(x), self.strides)[:, :, first:]
        if not self.keeps:
            return made
        kept = _unpacked(x, self.strides)[:, :, first:]
        times = math.prod(self.strides) // self.reduction
        return made + kept.repeat(1, times, 1, 1, 1)


BLOCKS: dict[str, Any] = {
    "res": Residuals,
    "widen": Widen,
    "stride": Stride,
    "pack": Pack,
    "unpack": Unpack,
}


def _packed(x: Tensor, strides: Strides) -> Tensor:
    t, h, w = strides
    return rearrange(x, "b c (f t) (y h) (x w) -> b (c t h w) f y x", t=t, h=h, w=w)


def _unpacked(x: Tensor, strides: Strides) -> Tensor:
    t, h, w = strides
    return rearrange(x, "b (c t h w) f y x -> b c (f t) (y h) (x w)", t=t, h=h, w=w)


def _place(parts: Parts) -> dict[str, Any]:
    return {"dtype": parts["dtype"], "device": parts["device"]}


class Encoder(nn.Module):
    """Video to the mean latent and one channel of its variance."""

    def __init__(self, config: LTXVConfig, parts: Parts) -> None:
        super().__init__()
        first, last = config.encoder[0].width, config.encoder[-1].out
        self.conv_in = CausalConv3d(3 * PATCH**2, first, **parts)
        self.down_blocks = nn.ModuleList(
            BLOCKS[sizes.kind](sizes, True, parts) for sizes in config.encoder
        )
        self.conv_norm_out = PixelNorm()
        self.conv_out = CausalConv3d(last, config.z_channels + 1, **parts)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.Generator().manual_seed(NOISE_SEED)
        x = rearrange(x, "b c f (y q) (x r) -> b (c r q) f y x", q=PATCH, r=PATCH)
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x, None, noise)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


class Decoder(nn.Module):
    """Latent to video, about -1..1."""

    def __init__(self, config: LTXVConfig, parts: Parts) -> None:
        super().__init__()
        first, last = config.decoder[0].width, config.decoder[-1].out
        place, causal = _place(parts), config.causal_decoder
        self.conv_in = CausalConv3d(config.z_channels, first, causal=causal, **parts)
        self.up_blocks = nn.ModuleList(
            BLOCKS[sizes.kind](sizes, causal, parts) for sizes in config.decoder
        )
        self.conv_norm_out = PixelNorm()
        self.conv_out = CausalConv3d(last, 3 * PATCH**2, causal=causal, **parts)
        self.has_time = config.has_time
        if config.has_time:
            self.timestep_scale_multiplier = nn.Parameter(torch.empty((), **place))
            self.last_time_embedder = TimeEmbedder(2 * last, parts)
            self.last_scale_shift_table = nn.Parameter(torch.empty(2, last, **place))

    def forward(self, x: Tensor, time: float, noise: torch.Generator) -> Tensor:
        times = None
        if self.has_time:
            times = self.timestep_scale_multiplier.float() * time
            times = times.to(x.device).expand(x.shape[0])
        x = self.conv_in(x)
        for block in self.up_blocks:
            x = block(x, times, noise)
        x = self.conv_norm_out(x)
        if times is not None:
            told = self.last_time_embedder(times, x.dtype).unflatten(1, (2, -1))
            table = self.last_scale_shift_table.to(x)[None, :, :, None, None, None]
            shift, scale = (table + told).unbind(1)
            x = _modulated(x, shift, scale)
        x = self.conv_out(F.silu(x))
        return rearrange(x, "b (c r q) f y x -> b c f (y q) (x r)", q=PATCH, r=PATCH)


class Statistics(nn.Module):
    """Mean and spread of each channel of latents, which normed latents have not."""

    def __init__(self, channels: int, parts: Parts) -> None:
        super().__init__()
        for name in ("std-of-means", "mean-of-means"):
            self.register_buffer(name, torch.empty(channels, **_place(parts)))

    def _both(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.get_buffer("mean-of-means"), self.get_buffer("std-of-means")
        return mean.to(like)[:, None, None, None], spread.to(like)[:, None, None, None]

    def normalize(self, latent: Tensor) -> Tensor:
        """Of the encoder -> of the network."""
        mean, spread = self._both(latent)
        return (latent - mean) / spread

    def un_normalize(self, latent: Tensor) -> Tensor:
        """Of the network -> of the decoder."""
        mean, spread = self._both(latent)
        return latent * spread + mean


class LTXVideoVAE(nn.Module):
    """Encoder and decoder between videos ``[B, 3, T, H, W]`` and normed latents."""

    def __init__(
        self,
        config: LTXVConfig,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        parts = {"dtype": dtype, "device": device, "operations": operations}
        self.config = config
        self.encoder = Encoder(config, {**parts, "spatial_padding_mode": config.encoder_border})
        self.decoder = Decoder(config, {**parts, "spatial_padding_mode": config.decoder_border})
        self.per_channel_statistics = Statistics(config.z_channels, parts)

    def encode(self, x: Tensor) -> Tensor:
        """The mean latent of a video in -1..1; frames beyond a multiple of eight and one are left
        out."""
        x = x[:, :, : (x.shape[2] - 1) // FRAMES * FRAMES + 1]
        return self.per_channel_statistics.normalize(self.encoder(x)[:, : self.config.z_channels])

    def decode(self, z: Tensor, **_: Any) -> Tensor:
        """Video about -1..1 of a latent."""
        generator = torch.Generator().manual_seed(NOISE_SEED)
        if self.config.has_time:
            noise = torch.randn(z.shape[1:], generator=generator).to(z)
            z = noise * DECODE_NOISE + (1.0 - DECODE_NOISE) * z
        return self.decoder(self.per_channel_statistics.un_normalize(z), DECODE_TIME, generator)
