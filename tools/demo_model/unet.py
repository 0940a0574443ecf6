"""The small noise-predicting UNet, with the module names of the SD 1.x single-file layout.

64 channels, three resolutions of 1, 2 and 3 times as many, one residual block each; attention
only at the second resolution and in the middle: on a CPU, attention at full resolution took half
of a training step.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, MULTIPLIERS, ATTENTION_LEVEL = 64, (1, 2, 3), 1
CONTEXT_SIZE, HEADS, NORM_GROUPS = 128, 8, 8


def timestep_embedding(timesteps: Tensor, size: int) -> Tensor:
    """Cosines, then sines, of timesteps [B] at `size` / 2 frequencies from 1 down to 1/10000."""
    half = size // 2
    frequencies = torch.exp(-math.log(10_000) * torch.arange(half, device=timesteps.device) / half)
    angles = timesteps[:, None].float() * frequencies[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ResBlock(nn.Module):
    """Two normalised convolutions with the timestep added between them."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(NORM_GROUPS, channels_in),
            nn.SiLU(),
            nn.Conv2d(channels_in, channels_out, 3, padding=1),
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(4 * CHANNELS, channels_out))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(NORM_GROUPS, channels_out),
            nn.SiLU(),
            nn.Dropout(0.0),
            nn.Conv2d(channels_out, channels_out, 3, padding=1),
        )
        is_same = channels_in == channels_out
        self.skip_connection = nn.Identity() if is_same else nn.Conv2d(channels_in, channels_out, 1)
        _zero(self.out_layers[3])

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.in_layers(x) + self.emb_layers(embedding)[:, :, None, None]
        return self.skip_connection(x) + self.out_layers(h)


def _zero(layer: nn.Conv2d) -> None:
    """Make a branch start without effect."""
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)


class Attention(nn.Module):
    """Multi-head attention from x [B, N, C] to `context` [B, L, D], or to itself."""

    def __init__(self, channels: int, context_size: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(channels, channels, bias=False)
        self.to_k = nn.Linear(context_size, channels, bias=False)
        self.to_v = nn.Linear(context_size, channels, bias=False)
        self.to_out = nn.Sequential(nn.Linear(channels, channels), nn.Dropout(0.0))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            projected.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for projected in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(attended.transpose(1, 2).flatten(2))


class GatedGelu(nn.Module):
    """A linear layer gated by the GELU of another."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.proj = nn.Linear(channels_in, 2 * channels_out)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.gelu(gate)


class FeedForward(nn.Module):
    """Position-wise network, four times as wide inside."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            GatedGelu(channels, 4 * channels), nn.Dropout(0.0), nn.Linear(4 * channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class TransformerBlock(nn.Module):
    """Attention to the picture, attention to the text, feed-forward."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attn1 = Attention(channels, channels)
        self.ff = FeedForward(channels)
        self.attn2 = Attention(channels, CONTEXT_SIZE)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(channels) for _ in range(3))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attn1(normed, normed)
        x = x + self.attn2(self.norm2(x), context)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(nn.Module):
    """A transformer block over all positions of a feature map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(NORM_GROUPS, channels, eps=1e-6)
        self.proj_in = nn.Conv2d(channels, channels, 1)
        self.transformer_blocks = nn.ModuleList([TransformerBlock(channels)])
        self.proj_out = nn.Conv2d(channels, channels, 1)
        _zero(self.proj_out)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        tokens = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        for block in self.transformer_blocks:
            tokens = block(tokens, context)
        return x + self.proj_out(tokens.transpose(1, 2).reshape(x.shape))


class Downsample(nn.Module):
    """Halves height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x)


class Upsample(nn.Module):
    """Doubles height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Stage(nn.Sequential):
    """Layers in a row, each given the timestep or the text if it takes them."""

    def forward(self, x: Tensor, embedding: Tensor, context: Tensor) -> Tensor:
        for layer in self:
            if isinstance(layer, ResBlock):
                x = layer(x, embedding)
            elif isinstance(layer, SpatialTransformer):
                x = layer(x, context)
            else:
                x = layer(x)
        return x


def _stage(channels_in: int, channels_out: int, level: int) -> list[nn.Module]:
    layers: list[nn.Module] = [ResBlock(channels_in, channels_out)]
    if level == ATTENTION_LEVEL:
        layers.append(SpatialTransformer(channels_out))
    return layers


class UNet(nn.Module):
    """Predicts the noise in latents [B, 4, H, W] at timesteps [B] given text [B, L, 128].

    H and W must be multiples of 4.
    """

    def __init__(self) -> None:
        super().__init__()
        self.time_embed = nn.Sequential(
            nn.Linear(CHANNELS, 4 * CHANNELS), nn.SiLU(), nn.Linear(4 * CHANNELS, 4 * CHANNELS)
        )
        self.input_blocks = nn.ModuleList([Stage(nn.Conv2d(4, CHANNELS, 3, padding=1))])
        skips, width, last = [CHANNELS], CHANNELS, len(MULTIPLIERS) - 1
        for level, multiplier in enumerate(MULTIPLIERS):
            self.input_blocks.append(Stage(*_stage(width, multiplier * CHANNELS, level)))
            width = multiplier * CHANNELS
            skips.append(width)
            if level < last:
                self.input_blocks.append(Stage(Downsample(width)))
                skips.append(width)
        self.middle_block = Stage(
            ResBlock(width, width), SpatialTransformer(width), ResBlock(width, width)
        )
        self.output_blocks = nn.ModuleList()
        for level in reversed(range(len(MULTIPLIERS))):
            for is_last in (False, True):
                layers = _stage(width + skips.pop(), MULTIPLIERS[level] * CHANNELS, level)
                width = MULTIPLIERS[level] * CHANNELS
                if level > 0 and is_last:
                    layers.append(Upsample(width))
                self.output_blocks.append(Stage(*layers))
        self.out = nn.Sequential(
            nn.GroupNorm(NORM_GROUPS, width), nn.SiLU(), nn.Conv2d(width, 4, 3, padding=1)
        )
        _zero(self.out[2])

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor) -> Tensor:
        embedding = self.time_embed(timestep_embedding(timesteps, CHANNELS))
        skips: list[Tensor] = []
        for stage in self.input_blocks:
            x = stage(x, embedding, context)
            skips.append(x)
        x = self.middle_block(x, embedding, context)
        for stage in self.output_blocks:
            x = stage(torch.cat([x, skips.pop()], dim=1), embedding, context)
        return self.out(x)
