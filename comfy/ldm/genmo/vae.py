"""The video autoencoder of Mochi 1: six frames and 8 x 8 pixels to a cell, the first frame alone.

All convolutions look back in time only, and repeat the border. Keys follow the published files,
in which each half is a sequence of layers by number; a half may come alone.
Source: https://github.com/genmoai/mochi (Genmo, 2024).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.autoencoder.layers import Level, nonlinearity, through
from comfy.nn import attention

NORM_GROUPS, NORM_EPS = 32, 1e-5
HEAD = 32  # channels of a head
WAVES = (6, 7)  # powers of two: how often values of a picture go round
IMAGE_CHANNELS = 3
SPACE = 2  # rows and columns that each stage makes one
TIMES = (1, 2, 3)  # frames that each stage of the encoder makes one
BOTH = "load one with both halves (their keys begin with encoder. and decoder.)"
FRAMES, PIXELS = math.prod(TIMES), SPACE ** len(TIMES)  # of a cell


@dataclass(frozen=True)
class MochiVAEConfig:
    """Sizes of an autoencoder.

    Attributes:
        encoder, decoder: Widths from fine to coarse, four each.
        encoder_blocks, decoder_blocks: Residual blocks at each width, then in the middle.
    """

    encoder: tuple[int, ...] = (64, 128, 256, 384)
    decoder: tuple[int, ...] = (128, 256, 512, 768)
    encoder_blocks: tuple[int, ...] = (3, 3, 4, 6, 3)
    decoder_blocks: tuple[int, ...] = (3, 3, 4, 6, 3)
    z_channels: int = 12


@dataclass(frozen=True)
class Maker:
    """Makes layers of one kind."""

    operations: Any = ops.disable_weight_init
    dtype: Any = None
    device: Any = None

    @property
    def place(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device}

    def linear(self, inputs: int, outputs: int, bias: bool = True) -> Any:
        """A linear layer, which here acts on the channels of each cell."""
        return self.operations.Linear(inputs, outputs, bias=bias, **self.place)


def by_cell(layer: nn.Module, x: Tensor) -> Tensor:
    """A linear layer over the channels of ``x [B, C, T, H, W]``."""
    return layer(x.movedim(1, -1)).movedim(-1, 1)


def causal_conv(
    channels: int, out: int, kernel: Sequence[int], make: Maker, stride: Any = 1
) -> Any:
    """A convolution for `looking_back`."""
    return make.operations.Conv3d(channels, out, kernel, stride=stride, **make.place)


def looking_back(conv: Any, x: Tensor) -> Tensor:
    """A convolution whose first frame and borders are repeated."""
    time, rows, columns = conv.kernel_size
    sides = [(columns - 1) // 2] * 2 + [(rows - 1) // 2] * 2
    x = F.pad(x, [*sides, time - 1, 0], mode="replicate")  # nobody needs what it was
    return conv(x)


def norm(width: int, make: Maker) -> Any:
    """A norm for `by_frame`."""
    return make.operations.GroupNorm(NORM_GROUPS, width, eps=NORM_EPS, **make.place)


def by_frame(layer: nn.Module, x: Tensor) -> Tensor:
    """A norm over each frame of ``x [B, C, T, H, W]``."""
    frames = layer(rearrange(x, "b c t h w -> (b t) c h w"))
    return rearrange(frames, "(b t) c h w -> b c t h w", b=x.shape[0])


class FrameAttention(nn.Module):
    """Attention of each cell to itself in this frame and those before; queries and keys have
    length 1.
    """

    def __init__(self, width: int, make: Maker) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.qkv = make.linear(width, 3 * width, bias=False)
        self.out = make.linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x [N, T, C]``, N being the cells of a frame."""
        parts = self.qkv(x).unflatten(-1, (3, self.heads, HEAD)).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        count = x.shape[1]
        hidden = torch.full((count, count), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        seen = attention.optimized_attention(q, k, v, self.heads, hidden, skip_reshape=True)
        return self.out(seen)


class AttentionBlock(nn.Module):
    """A norm before the attention, and a residual connection."""

    def __init__(self, width: int, make: Maker) -> None:
        super().__init__()
        self.norm, self.attn = norm(width, make), FrameAttention(width, make)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[3:]
        cells = rearrange(by_frame(self.norm, x), "b c t h w -> (b h w) t c")
        made = self.attn(cells)
        return x + rearrange(made, "(b h w) t c -> b c t h w", h=rows, w=columns)


class ResBlock(nn.Module):
    """Two norms and convolutions in a residual connection, then an attention where there is one."""

    def __init__(self, width: int, has_attention: bool, make: Maker) -> None:
        super().__init__()
        conv = (width, width, (3, 3, 3), make)
        self.stack = nn.ModuleList(
            [
                norm(width, make), nn.SiLU(), causal_conv(*conv),
                norm(width, make), nn.SiLU(), causal_conv(*conv),
            ]
        )  # fmt: skip
        self.attn_block = AttentionBlock(width, make) if has_attention else None

    def forward(self, x: Tensor) -> Tensor:
        norm1, _, conv1, norm2, _, conv2 = self.stack
        # In one expression: features without a name are freed as soon as they were read.
        h = looking_back(
            conv2,
            nonlinearity(by_frame(norm2, looking_back(conv1, nonlinearity(by_frame(norm1, x))))),
        )
        h = h.add_(x)
        return h if self.attn_block is None else self.attn_block(h)


class Downsample(Level):
    """A convolution that merges some frames, rows and columns into one, then residual blocks."""

    def __init__(self, channels: int, out: int, time: int, count: int, make: Maker) -> None:
        super().__init__()
        kernel = (time, SPACE, SPACE)
        blocks = (ResBlock(out, True, make) for _ in range(count))
        self.layers = nn.ModuleList(
            [causal_conv(channels, out, kernel, make, stride=kernel), *blocks]
        )

    def parts(self) -> Iterator[Callable[[Tensor], Tensor]]:
        conv, *blocks = self.layers
        yield functools.partial(looking_back, conv)
        yield from blocks


class Upsample(Level):
    """Residual blocks, then channels become frames, rows and columns; the first frame stays one."""

    def __init__(self, channels: int, out: int, time: int, count: int, make: Maker) -> None:
        super().__init__()
        self.time = time
        self.blocks = nn.Sequential(*(ResBlock(channels, False, make) for _ in range(count)))
        self.proj = make.linear(channels, out * time * SPACE**2)

    def parts(self) -> Iterator[Callable[[Tensor], Tensor]]:
        yield from self.blocks
        yield self._enlarged

    def _enlarged(self, x: Tensor) -> Tensor:
        x = by_cell(self.proj, x)
        x = rearrange(
            x, "b (c u v z) t h w -> b c (t u) (h v) (w z)", u=self.time, v=SPACE, z=SPACE
        )
        return x[:, :, self.time - 1 :]


def with_waves(x: Tensor) -> Tensor:
    """A picture's values, their sines and their cosines ``[B, 5 C, T, H, W]``."""
    turns = torch.tensor([2.0**power for power in WAVES], device=x.device) * (2 * math.pi)
    angles = (x.float()[:, :, None] * turns.view(1, 1, -1, 1, 1, 1)).flatten(1, 2)
    return torch.cat([x, angles.sin().to(x), angles.cos().to(x)], dim=1)


class Encoder(nn.Module):
    """Video ``[B, 3, 1 + 6 n, H, W]`` in -1..1 to the mean of its latents
    ``[B, z, 1 + n, h, w]``.
    """

    def __init__(
        self,
        config: MochiVAEConfig,
        dtype: torch.dtype | None = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        make = Maker(operations, dtype, device)
        widths, (first, *counts, last) = config.encoder, config.encoder_blocks
        inputs = IMAGE_CHANNELS * (1 + 2 * len(WAVES))
        layers: list[nn.Module] = [make.linear(inputs, widths[0])]
        layers += [ResBlock(widths[0], False, make) for _ in range(first)]
        for number, (time, count) in enumerate(zip(TIMES, counts)):
            layers.append(Downsample(widths[number], widths[number + 1], time, count, make))
        layers += [ResBlock(widths[-1], True, make) for _ in range(last)]
        self.layers = nn.ModuleList(layers)
        self.output_norm = norm(widths[-1], make)
        self.output_proj = make.linear(widths[-1], 2 * config.z_channels, bias=False)

    def encode(self, x: Tensor) -> Tensor:
        """See the class."""
        first, *layers = self.layers
        x = through(layers, by_cell(first, with_waves(x)))
        x = nonlinearity(by_frame(self.output_norm, x))
        return by_cell(self.output_proj, x).chunk(2, dim=1)[0]

    def decode(self, z: Tensor) -> Tensor:
        """Refuses: the file has no decoder."""
        del z
        raise ValueError(f"this file of Mochi's autoencoder holds the encoder alone; {BOTH}")


class Decoder(nn.Module):
    """Inverse of `Encoder`."""

    def __init__(
        self,
        config: MochiVAEConfig,
        dtype: torch.dtype | None = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        make = Maker(operations, dtype, device)
        widths, (last, *counts, first) = config.decoder, config.decoder_blocks
        entrance = make.operations.Conv3d(config.z_channels, widths[-1], (1, 1, 1), **make.place)
        middle = (ResBlock(widths[-1], False, make) for _ in range(first))
        stages: list[nn.Module] = [nn.Sequential(entrance, *middle)]
        for number in reversed(range(len(TIMES))):
            sizes = (widths[number + 1], widths[number], TIMES[number], counts[number])
            stages.append(Upsample(*sizes, make))
        stages.append(nn.Sequential(*(ResBlock(widths[0], False, make) for _ in range(last))))
        self.blocks = nn.Sequential(*stages)
        self.output_proj = make.linear(widths[0], IMAGE_CHANNELS)

    def decode(self, z: Tensor) -> Tensor:
        """Video ``[B, 3, 1 + 6 n, H, W]``, in about -1..1, of a latent ``[B, z, 1 + n, h, w]``."""
        stages: list[Any] = list(self.blocks)
        first, *middle, last = stages
        x = through([*first, *middle, *last], z)
        return by_cell(self.output_proj, F.silu(x, inplace=True))

    def encode(self, x: Tensor) -> Tensor:
        """Refuses: the file has no encoder."""
        del x
        raise ValueError(f"this file of Mochi's autoencoder holds the decoder alone; {BOTH}")


class VideoVAE(nn.Module):
    """Both halves."""

    def __init__(
        self,
        config: MochiVAEConfig | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        given = (config or MochiVAEConfig(), dtype, device, operations)
        self.encoder, self.decoder = Encoder(*given), Decoder(*given)

    def encode(self, x: Tensor) -> Tensor:
        """Video in -1..1 to the mean of its latents."""
        return self.encoder.encode(x)

    def decode(self, z: Tensor) -> Tensor:
        """A latent to a video in about -1..1."""
        return self.decoder.decode(z)
