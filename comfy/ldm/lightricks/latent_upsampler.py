"""Makes latents of LTX video larger or faster: residual blocks, a pixel shuffle, residual blocks.

Keys follow the published files: ``initial_conv``, ``res_blocks.N``, ``upsampler``,
``post_upsample_res_blocks.N``, ``final_conv``.
Source: HaCohen et al. 2024, https://arxiv.org/abs/2501.00103, and the LTX-Video repository.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops

NORM_GROUPS = 32
BINOMIAL = (1, 4, 6, 4, 1)  # the filter before places are left out
BLUR_KEY = "upsampler.blur_down.kernel"  # the same filter, as files have it


@dataclass(frozen=True)
class LatentUpsamplerConfig:
    """Sizes of one network.

    Attributes:
        channels, width: Of latents, and inside.
        blocks: Residual blocks before and, as many, after the shuffle.
        axes: 3 for convolutions over frames too, 2 for frame by frame.
        spatial: How much larger the sides become; 1 leaves them.
        is_rational: The shuffle's convolution and filter are in a module of their own.
        temporal: Twice as many frames, less the first of all.
    """

    channels: int
    width: int
    blocks: int
    axes: int
    spatial: Fraction
    is_rational: bool
    temporal: bool

    def __post_init__(self) -> None:
        if self.width % NORM_GROUPS:
            raise ValueError(f"width {self.width} is not divisible by {NORM_GROUPS} norm groups")


def config_of(sd: Mapping[str, Tensor], scale: float | None = None) -> LatentUpsamplerConfig:
    """Sizes from weights.

    Args:
        scale: How much larger the sides become, as the file's header says; only needed where
            places are left out after the shuffle.
    Raises:
        KeyError: A weight that tells a size is missing.
        ValueError: The weights are of a kind that is not known.
    """
    first = sd["initial_conv.weight"]
    width, channels = first.shape[:2]
    is_rational = "upsampler.conv.weight" in sd
    conv = sd["upsampler.conv.weight" if is_rational else "upsampler.0.weight"]
    times, over_frames = conv.shape[0] // width, conv.ndim == 5
    kinds = {(False, 4): (2, False), (True, 2): (1, True), (True, 8): (2, True)}
    if is_rational:
        spatial, temporal = _fraction(math.isqrt(times), scale), False
    elif (over_frames, times) in kinds:
        side, temporal = kinds[over_frames, times]
        spatial = Fraction(side)
    else:
        raise ValueError(
            f"expected a shuffle of 4 (sides), 2 (frames) or 8 (both), found upsampler.0.weight of "
            f"shape {list(conv.shape)} at width {width}"
        )
    return LatentUpsamplerConfig(
        channels=channels,
        width=width,
        blocks=len({m[1] for key in sd if (m := re.match(r"res_blocks\.(\d+)\.", key))}),
        axes=first.ndim - 2,
        spatial=spatial,
        is_rational=is_rational,
        temporal=temporal,
    )


def _fraction(shuffle: int, scale: float | None) -> Fraction:
    if scale is None and shuffle in (2, 4):
        return Fraction(shuffle)
    found = Fraction(scale or 0).limit_denominator(8)
    if found.numerator != shuffle:
        raise ValueError(
            f"expected the header's config.spatial_scale to be a fraction of {shuffle}, found "
            f"{scale}"
        )
    return found


class ResBlock(nn.Module):
    """Two convolutions and norms, added to what was given."""

    def __init__(self, width: int, axes: int, place: dict[str, Any], operations: Any) -> None:
        super().__init__()
        self.conv1 = operations.conv_nd(axes, width, width, 3, padding=1, **place)
        self.norm1 = operations.GroupNorm(NORM_GROUPS, width, **place)
        self.conv2 = operations.conv_nd(axes, width, width, 3, padding=1, **place)
        self.norm2 = operations.GroupNorm(NORM_GROUPS, width, **place)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(h)) + x)


class RationalResampler(nn.Module):
    """Frames made larger by a fraction: a shuffle by its upper part, a blur and steps of its
    lower."""

    def __init__(self, width: int, scale: Fraction, place: dict[str, Any], operations: Any) -> None:
        super().__init__()
        self.scale = scale
        self.conv = operations.Conv2d(width, scale.numerator**2 * width, 3, padding=1, **place)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_shuffle(self.conv(x), self.scale.numerator)
        if self.scale.denominator == 1:
            return x
        line = torch.tensor(BINOMIAL, dtype=x.dtype, device=x.device) / sum(BINOMIAL)
        kernel = torch.outer(line, line).expand(x.shape[1], 1, -1, -1)
        step, reach = self.scale.denominator, len(BINOMIAL) // 2
        return F.conv2d(x, kernel, stride=step, padding=reach, groups=x.shape[1])


class LatentUpsampler(nn.Module):
    """Latents [B, C, T, H, W], not normalised, to larger or longer ones."""

    def __init__(
        self,
        config: LatentUpsamplerConfig,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.config = config
        width, axes = config.width, config.axes

        def blocks() -> nn.ModuleList:
            made = (ResBlock(width, axes, place, operations) for _ in range(config.blocks))
            return nn.ModuleList(made)

        self.initial_conv = operations.conv_nd(axes, config.channels, width, 3, padding=1, **place)
        self.initial_norm = operations.GroupNorm(NORM_GROUPS, width, **place)
        self.res_blocks = blocks()
        self.upsampler: nn.Module
        if config.is_rational:
            self.upsampler = RationalResampler(width, config.spatial, place, operations)
        else:
            times = int(config.spatial) ** 2 * (2 if config.temporal else 1)
            over = 3 if config.temporal else 2
            conv = operations.conv_nd(over, width, times * width, 3, padding=1, **place)
            self.upsampler = nn.Sequential(conv)  # the files count it as the first of two
        self.post_upsample_res_blocks = blocks()
        self.final_conv = operations.conv_nd(axes, width, config.channels, 3, padding=1, **place)

    def forward(self, latent: Tensor) -> Tensor:
        if self.config.axes == 3:
            return self._run(latent)
        frames = latent.shape[2]
        made = self._run(rearrange(latent, "b c t h w -> (b t) c h w"))
        return rearrange(made, "(b t) c h w -> b c t h w", t=frames)

    def _run(self, x: Tensor) -> Tensor:
        x = F.silu(self.initial_norm(self.initial_conv(x)))
        for block in self.res_blocks:
            x = block(x)
        x = self._enlarged(x)
        for block in self.post_upsample_res_blocks:
            x = block(x)
        return self.final_conv(x)

    def _enlarged(self, x: Tensor) -> Tensor:
        side = int(self.config.spatial)
        if self.config.temporal:
            order = "b (c pt ph pw) t h w -> b c (t pt) (h ph) (w pw)"
            x = rearrange(self.upsampler(x), order, pt=2, ph=side, pw=side)
            return x[:, :, 1:]  # the first cell holds a single frame
        frames = x.shape[2] if x.ndim == 5 else None
        if frames is not None:
            x = rearrange(x, "b c t h w -> (b t) c h w")
        x = self.upsampler(x)
        if not self.config.is_rational:
            x = F.pixel_shuffle(x, side)
        return x if frames is None else rearrange(x, "(b t) c h w -> b c t h w", t=frames)
