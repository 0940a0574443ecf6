"""Between pictures and the latents of Stable Cascade's stage C: an encoder, which is the body of
EfficientNetV2 small, and a small decoder that shows what a latent will become.

Source: https://arxiv.org/abs/2104.00298; https://arxiv.org/abs/2306.00637.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from comfy import ops

COLOURS = 3
BODY_EPS = 1e-3
SQUEEZED = 4  # by how much the channels that weigh a block's are fewer than those it is given


@dataclass(frozen=True)
class BodyLevel:
    """Blocks of one width.

    Attributes:
        is_fused: Whether one convolution stands for those of each channel and of each cell.
        expansion: Channels inside, in those that a block is given.
    """

    is_fused: bool
    expansion: int
    stride: int
    width: int
    layers: int


FIRST_WIDTH, LAST_WIDTH = 24, 1280
LEVELS = (
    BodyLevel(True, 1, 1, 24, 2), BodyLevel(True, 4, 2, 48, 4), BodyLevel(True, 4, 2, 64, 4),
    BodyLevel(False, 4, 2, 128, 6), BodyLevel(False, 6, 1, 160, 9), BodyLevel(False, 6, 2, 256, 15),
)  # fmt: skip


def conv_norm(
    width: int,
    out: int,
    kernel: int,
    operations: Any,
    *,
    stride: int = 1,
    groups: int = 1,
    acts: bool = True,
    **place: Any,
) -> nn.Sequential:
    """A convolution, a norm over the training's pictures, and SiLU."""
    conv = operations.Conv2d(
        width, out, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False, **place
    )
    norm = nn.BatchNorm2d(out, eps=BODY_EPS, **place)
    return nn.Sequential(conv, norm, nn.SiLU()) if acts else nn.Sequential(conv, norm)


class SqueezeExcitation(nn.Module):
    """Weighs channels by what the whole picture has in them."""

    def __init__(self, width: int, inner: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.fc1 = operations.Conv2d(width, inner, 1, **place)
        self.fc2 = operations.Conv2d(inner, width, 1, **place)

    def forward(self, x: Tensor) -> Tensor:
        share = self.fc2(functional.silu(self.fc1(x.mean(dim=(2, 3), keepdim=True))))
        return x * share.sigmoid()


class BodyBlock(nn.Module):
    """Expand, look around, project; what it is given is added where sizes allow."""

    def __init__(
        self, level: BodyLevel, width: int, stride: int, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        out, inner = level.width, level.expansion * width
        self.adds = stride == 1 and width == out
        parts = {"operations": operations, **place}
        if level.is_fused and level.expansion == 1:
            layers = [conv_norm(width, out, 3, stride=stride, **parts)]
        elif level.is_fused:
            layers = [
                conv_norm(width, inner, 3, stride=stride, **parts),
                conv_norm(inner, out, 1, acts=False, **parts),
            ]
        else:
            layers = [
                conv_norm(width, inner, 1, **parts),
                conv_norm(inner, inner, 3, stride=stride, groups=inner, **parts),
                SqueezeExcitation(inner, max(1, width // SQUEEZED), **parts),  # type: ignore[list-item]
                conv_norm(inner, out, 1, acts=False, **parts),
            ]
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x) if self.adds else self.block(x)


class EffnetEncoder(nn.Module):
    """Pictures in -1..1 to latents, 32 pixels a cell."""

    def __init__(
        self,
        c_latent: int,
        levels: Sequence[BodyLevel] = LEVELS,
        first: int = FIRST_WIDTH,
        last: int = LAST_WIDTH,
        operations: Any = ops.disable_weight_init,
        **place: Any,
    ) -> None:
        super().__init__()
        parts = {"operations": operations, **place}
        layers: list[nn.Module] = [conv_norm(COLOURS, first, 3, stride=2, **parts)]
        width = first
        for level in levels:
            blocks = []
            for number in range(level.layers):
                stride = level.stride if number == 0 else 1
                blocks.append(BodyBlock(level, width, stride, **parts))
                width = level.width
            layers.append(nn.Sequential(*blocks))
        self.backbone = nn.Sequential(*layers, conv_norm(width, last, 1, **parts))
        self.mapper = nn.Sequential(
            operations.Conv2d(last, c_latent, 1, bias=False, **place),
            nn.BatchNorm2d(c_latent, affine=False, **place),
        )
        self.mean = nn.Parameter(torch.empty(COLOURS, **place))
        self.std = nn.Parameter(torch.empty(COLOURS, **place))

    def forward(self, x: Tensor) -> Tensor:
        mean, std = (part.to(x).view(-1, 1, 1) for part in (self.mean, self.std))
        return self.mapper(self.backbone((x * 0.5 + 0.5 - mean) / std))


class Previewer(nn.Module):
    """Latents to small pictures in -1..1, 4 pixels a cell."""

    def __init__(self, c_in: int, c_hidden: int, operations: Any, **place: Any) -> None:
        super().__init__()
        half, quarter = c_hidden // 2, c_hidden // 4
        conv, larger = operations.Conv2d, operations.ConvTranspose2d
        layers: list[nn.Module] = []
        for made, width in (
            (conv(c_in, c_hidden, 1, **place), c_hidden),
            (conv(c_hidden, c_hidden, 3, padding=1, **place), c_hidden),
            (larger(c_hidden, half, 2, stride=2, **place), half),
            (conv(half, half, 3, padding=1, **place), half),
            (larger(half, quarter, 2, stride=2, **place), quarter),
            (conv(quarter, quarter, 3, padding=1, **place), quarter),
        ):
            layers += [made, nn.GELU(), nn.BatchNorm2d(width, **place)]
        self.blocks = nn.Sequential(*layers, conv(quarter, COLOURS, 1, **place))

    def forward(self, x: Tensor) -> Tensor:
        return (self.blocks(x) - 0.5) * 2.0


class StageC_coder(nn.Module):
    """Either half, or both.

    Args:
        c_hidden: Channels of the decoder's widest layers.
        has_encoder, has_previewer: Which halves a file holds.
    """

    def __init__(
        self,
        c_latent: int = 16,
        c_hidden: int = 512,
        has_encoder: bool = True,
        has_previewer: bool = True,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.disable_weight_init,
    ) -> None:
        super().__init__()
        parts = {"operations": operations, "dtype": dtype, "device": device}
        self.encoder = EffnetEncoder(c_latent, **parts) if has_encoder else None
        self.previewer = Previewer(c_latent, c_hidden, **parts) if has_previewer else None

    def encode(self, x: Tensor) -> Tensor:
        """Latent ``[B, z, H / 32, W / 32]`` of pictures in -1..1.

        Raises:
            ValueError: The file holds the decoder alone.
        """
        if self.encoder is None:
            raise ValueError("this file of stage C only shows latents; load the encoder of stage C")
        return self.encoder(x)

    def decode(self, x: Tensor) -> Tensor:
        """Pictures in -1..1 of latents.

        Raises:
            ValueError: The file holds the encoder alone.
        """
        if self.previewer is None:
            raise ValueError(
                "this file of stage C only encodes; its latents become pictures by stage B, or in "
                "small by the previewer of stage C"
            )
        return self.previewer(x)
