"""The sound autoencoder of LTX-2: four spectra of 64 mel bands in sixteen cells of 8 channels.

Its convolutions see the past only, so that a sound can be of any length. Keys follow the published
files: ``encoder.down.N.block.M``, ``decoder.up.N.block.M``, ``per_channel_statistics``.
Source: HaCohen et al. 2026, https://arxiv.org/abs/2601.03233.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.lightricks.vae.causal_video_autoencoder import Statistics

NORM_EPS = 1e-6
Parts = dict[str, Any]


@dataclass(frozen=True)
class AudioVAEConfig:
    """Sizes of one autoencoder.

    Attributes:
        ch: Channels of the first level; `ch_mult` says how many times as many each level has.
        num_res_blocks: Residual layers of a level of the encoder; the decoder has one more.
        z_channels: Channels of a latent.
        channels: Channels of the sound.
        bands: Mel bands of a spectrum.
    """

    ch: int = 128
    ch_mult: tuple[int, ...] = (1, 2, 4)
    num_res_blocks: int = 2
    z_channels: int = 8
    channels: int = 2
    bands: int = 64

    def __post_init__(self) -> None:
        if self.bands % self.ratio:
            raise ValueError(
                f"{self.bands} mel bands cannot be halved {len(self.ch_mult) - 1} times"
            )

    @property
    def ratio(self) -> int:
        """Spectra, and bands, that share a cell."""
        return 1 << (len(self.ch_mult) - 1)

    @property
    def widths(self) -> list[int]:
        """Channels of the levels."""
        return [self.ch * times for times in self.ch_mult]


def normed(x: Tensor) -> Tensor:
    """Division by the root mean square over the channels."""
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + NORM_EPS)


class CausalConv(nn.Module):
    """A convolution of ``[B, C, T, bands]`` that sees earlier spectra and bands on both sides."""

    def __init__(self, width: int, out: int, parts: Parts, kernel: int = 3) -> None:
        super().__init__()
        self.past, self.sides = kernel - 1, kernel // 2
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.conv = parts["operations"].Conv2d(width, out, kernel, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (self.sides, self.sides, self.past, 0)))


class Residual(nn.Module):
    """Two convolutions with norms before them, and a residual connection."""

    def __init__(self, width: int, out: int, parts: Parts) -> None:
        super().__init__()
        self.conv1, self.conv2 = CausalConv(width, out, parts), CausalConv(out, out, parts)
        same = width == out
        self.nin_shortcut = nn.Identity() if same else CausalConv(width, out, parts, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(normed(x)))
        return self.nin_shortcut(x) + self.conv2(F.silu(normed(h)))


class Halve(nn.Module):
    """Half as many spectra and bands."""

    def __init__(self, width: int, parts: Parts) -> None:
        super().__init__()
        place = {"dtype": parts["dtype"], "device": parts["device"]}
        self.conv = parts["operations"].Conv2d(width, width, 3, stride=2, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 2, 0)))


class Double(nn.Module):
    """Twice as many bands, and spectra but for the first, which stands for one."""

    def __init__(self, width: int, parts: Parts) -> None:
        super().__init__()
        self.conv = CausalConv(width, width, parts)

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
        return self.conv(x)[:, :, 1:]


class Level(nn.Module):
    """Residual layers of one width, and what leads to the next level."""

    def __init__(
        self, width: int, out: int, layers: int, parts: Parts, **next_level: nn.Module
    ) -> None:
        super().__init__()
        first = [Residual(width, out, parts)]
        self.block = nn.ModuleList(first + [Residual(out, out, parts) for _ in range(layers - 1)])
        for name, module in next_level.items():
            self.add_module(name, module)
        self.leads = tuple(next_level)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        for name in self.leads:
            x = self.get_submodule(name)(x)
        return x


class Middle(nn.Module):
    """Two residual layers where there are fewest cells."""

    def __init__(self, width: int, parts: Parts) -> None:
        super().__init__()
        self.block_1, self.block_2 = (
            Residual(width, width, parts),
            Residual(width, width, parts),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.block_1(x))


class Encoder(nn.Module):
    """Spectrogram to the mean latent and the logarithm of its variance."""

    def __init__(self, config: AudioVAEConfig, parts: Parts) -> None:
        super().__init__()
        widths, layers = config.widths, config.num_res_blocks
        self.conv_in = CausalConv(config.channels, config.ch, parts)
        self.down = nn.ModuleList()
        before = config.ch
        for level, width in enumerate(widths):
            leads: dict[str, nn.Module] = {}
            if level + 1 < len(widths):
                leads["downsample"] = Halve(width, parts)
            self.down.append(Level(before, width, layers, parts, **leads))
            before = width
        self.mid = Middle(before, parts)
        self.conv_out = CausalConv(before, 2 * config.z_channels, parts)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(normed(self.mid(x))))


class Decoder(nn.Module):
    """Latent to spectrogram."""

    def __init__(self, config: AudioVAEConfig, parts: Parts) -> None:
        super().__init__()
        widths, layers = config.widths, config.num_res_blocks + 1
        self.conv_in = CausalConv(config.z_channels, widths[-1], parts)
        self.mid = Middle(widths[-1], parts)
        levels: list[nn.Module] = []
        before = widths[-1]
        for level in range(len(widths) - 1, -1, -1):  # files count them from the last to run
            width = widths[level]
            leads: dict[str, nn.Module] = {"upsample": Double(width, parts)} if level else {}
            levels.insert(0, Level(before, width, layers, parts, **leads))
            before = width
        self.up = nn.ModuleList(levels)
        self.conv_out = CausalConv(before, config.channels, parts)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid(self.conv_in(x))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(normed(x)))


class AudioStatistics(Statistics):
    """Mean and spread of each channel of each band of latents ``[B, C, T, bands]``."""

    def __init__(self, channels: int, bands: int, parts: Parts) -> None:
        super().__init__(channels * bands, parts)
        self.bands = bands

    def _both(self, like: Tensor) -> tuple[Tensor, Tensor]:
        found = (self.get_buffer(name) for name in ("mean-of-means", "std-of-means"))
        mean, spread = (one.to(like).unflatten(0, (-1, self.bands))[:, None] for one in found)
        return mean, spread


class AudioAutoencoder(nn.Module):
    """Encoder and decoder between spectrograms ``[B, C, T, bands]``, natural logarithms, and
    normed latents ``[B, z, ceil(T / ratio), bands / ratio]``.
    """

    def __init__(
        self,
        config: AudioVAEConfig,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        parts = {"dtype": dtype, "device": device, "operations": operations}
        self.config = config
        self.encoder, self.decoder = Encoder(config, parts), Decoder(config, parts)
        bands = config.bands // config.ratio
        self.per_channel_statistics = AudioStatistics(config.z_channels, bands, parts)

    def encode(self, spectrogram: Tensor) -> Tensor:
        """The mean latent of a spectrogram."""
        mean, _ = self.encoder(spectrogram).chunk(2, dim=1)
        return self.per_channel_statistics.normalize(mean)

    def decode(self, latent: Tensor) -> Tensor:
        """Spectrogram of a latent, as long as a whole number of cells but for what is before the
        first spectrum."""
        return self.decoder(self.per_channel_statistics.un_normalize(latent))
