"""Refines the latents of HunyuanVideo 1.5 that were made larger by interpolation.

Two networks of convolutions that look back in time only. Keys follow the published files: of the
one for 720p ``in_conv``, ``blocks.N.block``, ``out_conv``; of the one for 1080p ``conv_in``,
``up.N.block.M``, ``norm_out``, ``conv_out``.
Source: the HunyuanVideo-1.5 report, https://arxiv.org/abs/2511.18870, and its repository.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops
from comfy.ldm.wan.vae_layers import Builder, RMS_norm

REACH = 3  # of every convolution but the shortcuts


class CausalConv3d(nn.Module):
    """A convolution that repeats the first frame before it, and the border around it."""

    def __init__(self, channels: int, out: int, build: Builder) -> None:
        super().__init__()
        self.conv = build.operations.Conv3d(channels, out, REACH, **build.place)

    def forward(self, x: Tensor) -> Tensor:
        half = REACH // 2
        return self.conv(F.pad(x, (half, half, half, half, REACH - 1, 0), mode="replicate"))


@dataclass(frozen=True)
class ResidualUpsamplerConfig:
    """Sizes of the network for 720p; depth is of convolutions in a block."""

    channels: int
    out: int
    width: int
    blocks: int
    depth: int


class ResidualBlock(nn.Module):
    """Convolutions with SiLU between them, added to what was given."""

    def __init__(self, width: int, depth: int, build: Builder) -> None:
        super().__init__()
        layers: list[nn.Module] = [CausalConv3d(width, width, build)]
        for _ in range(depth - 1):
            layers += [nn.SiLU(), CausalConv3d(width, width, build)]
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class SRModel3DV2(nn.Module):
    """The network for 720p: latents [B, C, T, H, W] to refined ones of that size."""

    def __init__(
        self,
        config: ResidualUpsamplerConfig,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        build = Builder(operations, {"dtype": dtype, "device": device})
        self.in_conv = CausalConv3d(config.channels, config.width, build)
        self.blocks = nn.ModuleList(
            ResidualBlock(config.width, config.depth, build) for _ in range(config.blocks)
        )
        self.out_conv = CausalConv3d(config.width, config.out, build)

    def forward(self, latent: Tensor) -> Tensor:
        x = self.in_conv(latent)
        for block in self.blocks:
            x = block(x)
        return self.out_conv(x)


def residual_config(sd: Mapping[str, Tensor]) -> ResidualUpsamplerConfig:
    """Sizes of the network for 720p from its weights; raises KeyError for a missing one."""
    width, channels = sd["in_conv.conv.weight"].shape[:2]
    found = [m for key in sd if (m := re.match(r"blocks\.(\d+)\.block\.(\d+)\.conv\.weight", key))]
    return ResidualUpsamplerConfig(
        channels=channels,
        out=sd["out_conv.conv.weight"].shape[0],
        width=width,
        blocks=len({m[1] for m in found}),
        depth=len({m[2] for m in found}),
    )


@dataclass(frozen=True)
class StagedUpsamplerConfig:
    """Sizes of the network for 1080p: the width of each stage, and how many blocks one has."""

    channels: int
    out: int
    widths: tuple[int, ...]
    blocks: int

    def __post_init__(self) -> None:
        if self.widths[0] % self.channels:
            raise ValueError(
                f"width {self.widths[0]} is not a multiple of the latent's {self.channels} channels"
            )


class ResnetBlock(nn.Module):
    """Two norms, activations and convolutions, and a way around them."""

    def __init__(self, channels: int, out: int, build: Builder) -> None:
        super().__init__()
        self.norm1 = RMS_norm(channels, images=False, **build.place)
        self.conv1 = CausalConv3d(channels, out, build)
        self.norm2 = RMS_norm(out, images=False, **build.place)
        self.conv2 = CausalConv3d(out, out, build)
        self.nin_shortcut: nn.Module = nn.Identity()
        if channels != out:
            self.nin_shortcut = build.operations.Conv3d(channels, out, 1, **build.place)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return self.conv2(F.silu(self.norm2(h))) + self.nin_shortcut(x)


class Stage(nn.Module):
    """Blocks of one width."""

    def __init__(self, channels: int, out: int, blocks: int, build: Builder) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            ResnetBlock(out if number else channels, out, build) for number in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.block:
            x = block(x)
        return x


class Upsampler(nn.Module):
    """The network for 1080p: latents [B, C, T, H, W] to refined ones of that size."""

    def __init__(
        self,
        config: StagedUpsamplerConfig,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        build = Builder(operations, {"dtype": dtype, "device": device})
        widths = config.widths
        self.repeats = widths[0] // config.channels
        self.conv_in = CausalConv3d(config.channels, widths[0], build)
        self.up = nn.ModuleList(
            Stage(channels, out, config.blocks, build)
            for channels, out in zip((widths[0], *widths), widths)
        )
        self.norm_out = RMS_norm(widths[-1], images=False, **build.place)
        self.conv_out = CausalConv3d(widths[-1], config.out, build)

    def forward(self, latent: Tensor) -> Tensor:
        x = self.conv_in(latent) + latent.repeat_interleave(self.repeats, dim=1)
        for stage in self.up:
            x = stage(x)
        return self.conv_out(F.silu(self.norm_out(x)))


def staged_config(sd: Mapping[str, Tensor]) -> StagedUpsamplerConfig:
    """Sizes of the network for 1080p from its weights.

    Raises:
        KeyError: A weight that tells a size is missing.
        ValueError: The sizes do not fit each other.
    """
    stages = sorted({int(m[1]) for key in sd if (m := re.match(r"up\.(\d+)\.block\.", key))})
    return StagedUpsamplerConfig(
        channels=sd["conv_in.conv.weight"].shape[1],
        out=sd["conv_out.conv.weight"].shape[0],
        widths=tuple(sd[f"up.{n}.block.0.conv1.conv.weight"].shape[0] for n in stages),
        blocks=len({m[1] for key in sd if (m := re.match(r"up\.0\.block\.(\d+)\.", key))}),
    )
