"""The small KL autoencoder: pictures [B, 3, H, W] in -1..1 to latents [B, 4, H/8, W/8] and back.

Module names give the keys of the Stable Diffusion 1.x single-file layout. Group normalisation
uses two groups: with 32 groups on 16 channels it is instance normalisation, which erases flat
colours, and training never leaves "grey".
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LATENT_SCALE = 0.18215  # the family's constant; `latent_space.standardise` makes the latents fit it
NORM_GROUPS = 2
LATENT_CHANNELS = 4


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(NORM_GROUPS, channels, eps=1e-6)


class ResnetBlock(nn.Module):
    """Two normalised convolutions around a shortcut; starts as the identity."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.norm1 = _norm(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, padding=1)
        self.norm2 = _norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        if channels_in != channels_out:
            self.nin_shortcut = nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x) + h


class AttentionBlock(nn.Module):
    """Single-head self-attention over all positions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        q, k, v = (layer(normed).flatten(2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return x + self.proj_out(attended)


class Downsample(nn.Module):
    """Halves height and width; pads right and below, as the layout's networks do."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Doubles height and width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class MiddleBlock(nn.Module):
    """The stage at the lowest resolution, where every position sees every other."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResnetBlock(channels, channels)
        self.attn_1 = AttentionBlock(channels)
        self.block_2 = ResnetBlock(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Level(nn.Module):
    """Residual blocks at one resolution, then an optional change of resolution."""

    def __init__(self, channels_in: int, channels_out: int, blocks: int) -> None:
        super().__init__()
        sizes = [channels_in] + [channels_out] * blocks
        self.block = nn.ModuleList(ResnetBlock(a, b) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        for name in ("downsample", "upsample"):
            if hasattr(self, name):
                x = getattr(self, name)(x)
        return x


class Encoder(nn.Module):
    """Picture to the moments of its latent [B, 2 x 4, H/8, W/8]."""

    def __init__(self, channels: int, multipliers: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, channels, 3, padding=1)
        self.down = nn.ModuleList()
        width = channels
        for i, multiplier in enumerate(multipliers):
            level = Level(width, channels * multiplier, blocks)
            width = channels * multiplier
            if i < len(multipliers) - 1:
                level.downsample = Downsample(width)
            self.down.append(level)
        self.mid = MiddleBlock(width)
        self.norm_out = _norm(width)
        self.conv_out = nn.Conv2d(width, 2 * LATENT_CHANNELS, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv_in(x)
        for level in self.down:
            h = level(h)
        return self.conv_out(F.silu(self.norm_out(self.mid(h))))


class Decoder(nn.Module):
    """Latent to picture; `up` is indexed by resolution, finest first, as in the layout."""

    def __init__(self, channels: int, multipliers: tuple[int, ...], blocks: int) -> None:
        super().__init__()
        width = channels * multipliers[-1]
        self.conv_in = nn.Conv2d(LATENT_CHANNELS, width, 3, padding=1)
        self.mid = MiddleBlock(width)
        levels: list[Level] = []
        for i in reversed(range(len(multipliers))):
            level = Level(width, channels * multipliers[i], blocks + 1)
            width = channels * multipliers[i]
            if i > 0:
                level.upsample = Upsample(width)
            levels.insert(0, level)
        self.up = nn.ModuleList(levels)
        self.norm_out = _norm(width)
        self.conv_out = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        h = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            h = level(h)
        return self.conv_out(F.silu(self.norm_out(h)))


class Autoencoder(nn.Module):
    """Encoder, decoder and the 1x1 convolutions into which changes of latent basis go."""

    def __init__(
        self, channels: int = 16, multipliers: tuple[int, ...] = (1, 2, 4, 6), blocks: int = 1
    ) -> None:
        super().__init__()
        self.encoder = Encoder(channels, multipliers, blocks)
        self.decoder = Decoder(channels, multipliers, blocks)
        self.quant_conv = nn.Conv2d(2 * LATENT_CHANNELS, 2 * LATENT_CHANNELS, 1)
        self.post_quant_conv = nn.Conv2d(LATENT_CHANNELS, LATENT_CHANNELS, 1)
        self._start_as_identity()

    @torch.no_grad()
    def _start_as_identity(self) -> None:
        """Keep the signal's size from layer to layer.

        The default initialisation shrinks it by 1/sqrt(3) a convolution, 700-fold over this
        depth, and training then sits at "predict grey" for a long time.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Downsample):
                module.conv.weight.mul_(0.3)
                diagonal = torch.arange(module.conv.in_channels)
                module.conv.weight[diagonal, diagonal, :2, :2] += 0.25
            elif isinstance(module, Upsample):
                module.conv.weight.mul_(0.3)
                diagonal = torch.arange(module.conv.in_channels)
                module.conv.weight[diagonal, diagonal, 1, 1] += 1.0
            elif isinstance(module, ResnetBlock):
                nn.init.zeros_(module.conv2.weight)
            elif isinstance(module, AttentionBlock):
                nn.init.zeros_(module.proj_out.weight)
        for module in (self.quant_conv, self.post_quant_conv):
            nn.init.eye_(module.weight[:, :, 0, 0])
        self.quant_conv.weight[LATENT_CHANNELS:] *= 0.1
        # A posterior of unit width would drown the signal before there is one.
        self.quant_conv.bias[LATENT_CHANNELS:] = -5.0

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance of the latent, both [B, 4, H/8, W/8], unscaled."""
        mean, log_variance = self.quant_conv(self.encoder(x)).chunk(2, dim=1)
        return mean, log_variance.clamp(-30, 20)

    def encode(self, x: Tensor) -> Tensor:
        """Scaled latents (mean of the posterior): about zero mean and unit variance."""
        return self.moments(x)[0] * LATENT_SCALE

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures in about -1..1 from scaled latents."""
        return self.decoder(self.post_quant_conv(latents / LATENT_SCALE))
