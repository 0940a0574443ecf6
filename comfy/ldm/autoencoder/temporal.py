"""The autoencoder of Stable Video Diffusion: its decoder also looks along the time.

The batch is the time: all latents of a call are the frames of one clip. Each residual block is
followed by one over time, mixed in by a learned share, and the last convolution by one over time.
Source: Blattmann et al. 2023, https://arxiv.org/abs/2311.15127, appendix D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.autoencoder.kl import AutoencoderKL
from comfy.ldm.autoencoder.layers import AutoencoderConfig, LayerMaker, ResnetBlock

TIME_KERNEL, TIME_PADDING = (3, 1, 1), (1, 0, 0)
NORM_EPS = 1e-5  # of the norms over time; those of pictures have 1e-6


def as_clip(frames: Tensor) -> Tensor:
    """Frames [T, C, H, W] as one clip [1, C, T, H, W]."""
    return frames.transpose(0, 1).unsqueeze(0)


def as_frames(clip: Tensor) -> Tensor:
    """The inverse of `as_clip`."""
    return clip.squeeze(0).transpose(0, 1)


class TimeBlock(nn.Module):
    """Two convolutions over time with norms before them, and a residual connection."""

    def __init__(self, channels: int, make: LayerMaker) -> None:
        super().__init__()
        place = {"dtype": make.dtype, "device": make.device}

        def norm() -> nn.Module:
            return make.operations.GroupNorm(make.norm_num_groups, channels, eps=NORM_EPS, **place)

        def conv() -> nn.Module:
            return make.operations.Conv3d(
                channels, channels, TIME_KERNEL, padding=TIME_PADDING, **place
            )

        self.in_layers = nn.Sequential(norm(), nn.SiLU(), conv())
        self.out_layers = nn.Sequential(norm(), nn.SiLU(), nn.Identity(), conv())

    def forward(self, clip: Tensor) -> Tensor:
        """Apply to ``[1, C, T, H, W]``."""
        return clip + self.out_layers(self.in_layers(clip))


class VideoResBlock(ResnetBlock):
    """A residual block of pictures, and one over time mixed in."""

    def __init__(self, of: ResnetBlock, make: LayerMaker) -> None:
        nn.Module.__init__(self)
        self.in_channels, self.out_channels = of.in_channels, of.out_channels
        for name, module in of.named_children():
            self.add_module(name, module)
        self.time_stack = TimeBlock(of.out_channels, make)
        empty = torch.empty(1, dtype=make.dtype, device=make.device)
        self.mix_factor = nn.Parameter(empty, requires_grad=False)

    def forward(self, x: Tensor, temb: Tensor | None = None) -> Tensor:
        clip = as_clip(super().forward(x, temb))
        share = torch.sigmoid(self.mix_factor).to(clip)
        return as_frames(share * self.time_stack(clip) + (1.0 - share) * clip)


class TimeMixConv(nn.Module):
    """A convolution of pictures, then one over time; the first keeps its keys."""

    def __init__(self, of: Any, make: LayerMaker) -> None:
        super().__init__()
        self.stride, self.padding = of.stride, of.padding
        self.weight, self.bias = of.weight, of.bias
        channels = of.out_channels
        self.time_mix_conv = make.operations.Conv3d(
            channels,
            channels,
            TIME_KERNEL,
            padding=TIME_PADDING,
            dtype=make.dtype,
            device=make.device,
        )

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x), self.bias.to(x)
        x = nn.functional.conv2d(x, weight, bias, self.stride, self.padding)
        return as_frames(self.time_mix_conv(as_clip(x)))


class TemporalAutoencoder(AutoencoderKL):
    """A KL autoencoder whose decoder looks along the time."""

    def __init__(
        self,
        ddconfig: AutoencoderConfig,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__(ddconfig, None, dtype=dtype, device=device, operations=operations)
        make = LayerMaker(operations, ddconfig.norm_num_groups, dtype, device)
        for parent in list(self.decoder.modules()):
            for name, block in list(parent.named_children()):
                if isinstance(block, ResnetBlock):
                    setattr(parent, name, VideoResBlock(block, make))
        self.decoder.conv_out = TimeMixConv(self.decoder.conv_out, make)
