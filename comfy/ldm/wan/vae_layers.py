"""The layers of Wan's autoencoders; `comfy.ldm.wan.vae` puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops
from comfy.ldm.autoencoder.layers import nonlinearity
from comfy.nn import attention


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


class CausalConv3d(ops.disable_weight_init.Conv3d):
    """A convolution whose padding along time is what came before.

    Args are those of `Conv3d`; of ``padding`` the first entry is how many frames stand on either
    side of one, all of which are earlier ones here.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        frames, rows, columns = (int(size) for size in self.padding)
        self.earlier_frames = 2 * frames
        self.padding = (0, rows, columns)

    def forward(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        """``x [B, C, T, H, W]``, before which ``cache_x`` stood; frames nobody knows are zeros."""
        missing = self.earlier_frames
        if cache_x is not None and missing:
            missing -= cache_x.shape[2]
            x = torch.cat([cache_x.to(x), x], dim=2)
        return super().forward(functional.pad(x, (0, 0, 0, 0, missing, 0)) if missing else x)


def causal(layer: Any, x: Tensor, past: Past) -> Tensor:
    """A convolution of frames, before which stand those that the layer saw before (else zeros)."""
    count = layer.earlier_frames
    return layer(x, past.before(layer, x, count)) if count else layer(x)


@dataclass(frozen=True)
class Builder:
    """Of what and where layers are made."""

    operations: Any
    place: dict[str, Any]


def _conv(channels: int, out: int, size: Sequence[int], build: Builder, **options: Any) -> Any:
    """A convolution that pads rows and columns to keep their size, and looks back in time."""
    options = {"padding": tuple(axis // 2 for axis in size), **options, **build.place}
    return CausalConv3d(channels, out, size, **options)


class RMS_norm(nn.Module):
    """Channels to length one, times the root of their number and a weight.

    Args:
        channel_first: Whether channels are the second axis, or the last.
        images: Whether there are rows and columns only, no frames.
    """

    def __init__(
        self,
        dim: int,
        channel_first: bool = True,
        images: bool = True,
        bias: bool = False,
        **place: Any,
    ) -> None:
        super().__init__()
        shape = (dim, *[1] * (2 if images else 3)) if channel_first else (dim,)
        self.channel_first, self.scale = channel_first, dim**0.5
        self.gamma = nn.Parameter(torch.empty(shape, **place))
        self.bias = nn.Parameter(torch.empty(shape, **place)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        axis = 1 if self.channel_first else -1
        made = functional.normalize(x, dim=axis) * self.scale * self.gamma.to(x)
        return made if self.bias is None else made + self.bias.to(x)


class ResidualBlock(nn.Module):
    """Two norms, activations and convolutions, and a way around them."""

    def __init__(self, channels: int, out: int, build: Builder) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            RMS_norm(channels, images=False, **build.place),
            nn.SiLU(),
            _conv(channels, out, (3, 3, 3), build),
            RMS_norm(out, images=False, **build.place),
            nn.SiLU(),
            nn.Identity(),
            _conv(out, out, (3, 3, 3), build),
        )
        self.shortcut: nn.Module = nn.Identity()
        if channels != out:
            self.shortcut = _conv(channels, out, (1, 1, 1), build)

    def forward(self, x: Tensor, past: Past) -> Tensor:
        norm1, _, conv1, norm2, _, _, conv2 = self.residual
        # In one expression: features without a name are freed as soon as they were read.
        h = causal(conv2, nonlinearity(norm2(causal(conv1, nonlinearity(norm1(x)), past))), past)
        return h.add_(self.shortcut(x))


class AttentionBlock(nn.Module):
    """Attention among the positions of each frame, with one head."""

    def __init__(self, dim: int, build: Builder) -> None:
        super().__init__()
        self.norm = RMS_norm(dim, **build.place)
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
            self.time_conv = _conv(dim, dim, (3, 1, 1), build, stride=(2, 1, 1), padding=0)

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
