"""Convolutional blocks of the UNet: residual blocks told the timestep, and resampling."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops


class TimestepBlock(nn.Module):
    """A module whose forward takes the timestep embedding as its second argument."""

    @abstractmethod
    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        """Apply the module to x given the embedding ``emb [B, E]``."""


class Upsample(nn.Module):
    """Double height and width (or reach a given shape) by nearest neighbour, then convolve."""

    def __init__(
        self,
        channels: int,
        use_conv: bool,
        dims: int = 2,
        out_channels: int | None = None,
        padding: int = 1,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.channels, self.out_channels = channels, out_channels or channels
        self.use_conv, self.dims = use_conv, dims
        if use_conv:
            self.conv = operations.conv_nd(
                dims, channels, self.out_channels, 3, padding=padding,
                dtype=dtype, device=device,
            )  # fmt: skip

    def forward(self, x: Tensor, output_shape: Sequence[int] | None = None) -> Tensor:
        """Upsample ``x [B, C, (T,) H, W]`` to ``output_shape`` (of the whole tensor), or
        twofold."""
        if x.shape[1] != self.channels:
            raise ValueError(f"Upsample made for {self.channels} channels got {x.shape[1]}")
        size = [x.shape[-2] * 2, x.shape[-1] * 2]
        if output_shape is not None:
            size = list(output_shape[-2:])
        if self.dims == 3:
            size = [x.shape[2], *size]
        x = F.interpolate(x, size=size, mode="nearest")
        return self.conv(x) if self.use_conv else x


class Downsample(nn.Module):
    """Halve height and width by a strided convolution or by averaging."""

    def __init__(
        self,
        channels: int,
        use_conv: bool,
        dims: int = 2,
        out_channels: int | None = None,
        padding: int = 1,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.channels, self.out_channels = channels, out_channels or channels
        self.use_conv, self.dims = use_conv, dims
        stride: Any = 2 if dims != 3 else (1, 2, 2)
        if use_conv:
            self.op = operations.conv_nd(
                dims, channels, self.out_channels, 3, stride=stride, padding=padding,
                dtype=dtype, device=device,
            )  # fmt: skip
        else:
            pool = nn.AvgPool3d if dims == 3 else nn.AvgPool2d
            self.op = pool(kernel_size=stride, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != self.channels:
            raise ValueError(f"Downsample made for {self.channels} channels got {x.shape[1]}")
        return self.op(x)


class ResBlock(TimestepBlock):
    """Two convolutions around a shift by the timestep embedding, with a residual connection."""

    compiles_alone = True

    def __init__(
        self,
        channels: int,
        emb_channels: int,
        dropout: float,
        out_channels: int | None = None,
        use_conv: bool = False,
        use_scale_shift_norm: bool = False,
        dims: int = 2,
        use_checkpoint: bool = False,
        up: bool = False,
        down: bool = False,
        kernel_size: int | Sequence[int] = 3,
        exchange_temb_dims: bool = False,
        skip_t_emb: bool = False,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
        norm_num_groups: int = 32,
    ) -> None:
        del use_checkpoint  # a training option
        super().__init__()
        self.channels, self.out_channels = channels, out_channels or channels
        self.use_scale_shift_norm = use_scale_shift_norm
        self.exchange_temb_dims, self.skip_t_emb = exchange_temb_dims, skip_t_emb
        place = {"dtype": dtype, "device": device}
        if isinstance(kernel_size, int):
            padding: Any = kernel_size // 2
        else:
            padding, kernel_size = tuple(k // 2 for k in kernel_size), tuple(kernel_size)

        def conv(inputs: int, kernel: Any, pad: Any) -> nn.Module:
            return operations.conv_nd(dims, inputs, self.out_channels, kernel, padding=pad, **place)

        self.in_layers = nn.Sequential(
            operations.GroupNorm(norm_num_groups, channels, **place),
            nn.SiLU(inplace=True),
            conv(channels, kernel_size, padding),
        )
        self.updown = up or down
        resample = Upsample if up else Downsample
        self.h_upd: nn.Module = resample(channels, False, dims) if self.updown else nn.Identity()
        self.x_upd: nn.Module = resample(channels, False, dims) if self.updown else nn.Identity()
        self.emb_layers: nn.Module | None = None
        if not skip_t_emb:
            width = 2 * self.out_channels if use_scale_shift_norm else self.out_channels
            self.emb_layers = nn.Sequential(
                nn.SiLU(), operations.Linear(emb_channels, width, **place)
            )
        self.out_layers = nn.Sequential(
            operations.GroupNorm(norm_num_groups, self.out_channels, **place),
            nn.SiLU(inplace=True),
            nn.Dropout(dropout),
            conv(self.out_channels, kernel_size, padding),
        )
        if self.out_channels == channels:
            self.skip_connection: nn.Module = nn.Identity()
        elif use_conv:
            self.skip_connection = conv(channels, kernel_size, padding)
        else:
            self.skip_connection = conv(channels, 1, 0)

    def forward(self, x: Tensor, emb: Tensor | None) -> Tensor:
        """Apply to ``x [B, C, (T,) H, W]`` with ``emb [B, E]`` (``[B, T, E]`` for video)."""
        if self.updown:
            norm, act, conv = self.in_layers
            h = conv(self.h_upd(act(norm(x))))
            x = self.x_upd(x)
        else:
            h = self.in_layers(x)
        if self.emb_layers is not None and emb is not None:
            h = self._shift(h, self.emb_layers(emb).to(h.dtype))
        else:
            h = self.out_layers(h)
        return self.skip_connection(x) + h

    def _shift(self, h: Tensor, emb: Tensor) -> Tensor:
        """Tell h the embedding: by addition before the norm, or by scale and shift after it."""
        if self.exchange_temb_dims:  # [B, T, C] -> [B, C, T]
            emb = emb.transpose(1, 2)
        emb = emb[(...,) + (None,) * (h.ndim - emb.ndim)]
        if not self.use_scale_shift_norm:
            return self.out_layers(h.add_(emb))
        norm, *rest = self.out_layers
        scale, shift = emb.chunk(2, dim=1)
        h = norm(h) * (1 + scale) + shift
        for layer in rest:
            h = layer(h)
        return h
