"""The convolution of LTX video's autoencoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from comfy import ops


class CausalConv3d(nn.Module):
    """A convolution that repeats frames at the border: of the past only, or on both sides.

    Args:
        kernel_size: Frames, rows and columns it sees; an odd number.
        spatial_padding_mode: What it sees beside a frame: "zeros", or frames mirrored ("reflect")
            or continued ("replicate").
        causal: Whether it sees the past only, where a call does not say.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int | tuple[int, int, int] = 1,
        dilation: int = 1,
        groups: int = 1,
        spatial_padding_mode: str = "zeros",
        *,
        causal: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.causal, self.border = causal, spatial_padding_mode
        self.frames, self.sides = dilation * (kernel_size - 1), kernel_size // 2
        inside = (0, self.sides, self.sides) if self.border == "zeros" else 0
        self.conv = operations.Conv3d(
            in_channels, out_channels, kernel_size, stride=stride, padding=inside,
            dilation=(dilation, 1, 1), groups=groups, dtype=dtype, device=device,
        )  # fmt: skip

    def forward(self, x: Tensor, causal: bool | None = None) -> Tensor:
        """``x [B, C, T, H, W]``."""
        is_causal = self.causal if causal is None else causal
        before = self.frames if is_causal else self.frames // 2
        parts = [x[:, :, :1]] * before + [x] + [x[:, :, -1:]] * (self.frames - before)
        x = torch.cat(parts, dim=2)
        if self.border != "zeros":
            x = F.pad(x, (*[self.sides] * 4, 0, 0), mode=self.border)
        return self.conv(x)
