"""T2I adapters, in the full, the light and the SDXL form.

Each gives one feature map per level of the UNet; the lists it returns have an entry per input
block, last block first, None where nothing is added.
Source: Mou et al. 2023, https://arxiv.org/abs/2302.08453.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

Features = dict[str, list[Tensor | None]]


class Downsample(nn.Module):
    """Halve the size by a strided convolution or by averaging (zeros around odd sizes)."""

    def __init__(self, channels: int, use_conv: bool) -> None:
        super().__init__()
        self.op: nn.Module
        if use_conv:
            self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)
        else:
            self.op = nn.AvgPool2d(2, 2)
        self.use_conv = use_conv

    def forward(self, x: Tensor) -> Tensor:
        if self.use_conv:
            return self.op(x)
        padding = (x.shape[2] % 2, x.shape[3] % 2)
        return nn.functional.avg_pool2d(x, 2, 2, padding=padding)


class ResnetBlock(nn.Module):
    """Two convolutions with a residual connection, which is itself a convolution when ``sk`` is
    off."""

    def __init__(
        self,
        in_c: int,
        out_c: int,
        down: bool,
        ksize: int = 3,
        sk: bool = False,
        use_conv: bool = True,
    ) -> None:
        super().__init__()
        around = ksize // 2
        self.in_conv: nn.Module | None = None
        if in_c != out_c or not sk:
            self.in_conv = nn.Conv2d(in_c, out_c, ksize, padding=around)
        self.block1 = nn.Conv2d(out_c, out_c, 3, padding=1)
        self.act = nn.ReLU()
        self.block2 = nn.Conv2d(out_c, out_c, ksize, padding=around)
        self.skep: nn.Module | None = None if sk else nn.Conv2d(out_c, out_c, ksize, padding=around)
        self.down_opt: nn.Module | None = Downsample(in_c, use_conv) if down else None

    def forward(self, x: Tensor) -> Tensor:
        if self.down_opt is not None:
            x = self.down_opt(x)
        if self.in_conv is not None:
            x = self.in_conv(x)
        h = self.block2(self.act(self.block1(x)))
        return h + (x if self.skep is None else self.skep(x))


class Adapter(nn.Module):
    """The full form; with ``xl`` that of SDXL, which halves the size once less often."""

    def __init__(
        self,
        channels: Sequence[int] = (320, 640, 1280, 1280),
        nums_rb: int = 3,
        cin: int = 64,
        ksize: int = 3,
        sk: bool = False,
        use_conv: bool = True,
        xl: bool = True,
    ) -> None:
        super().__init__()
        self.channels, self.nums_rb, self.xl = list(channels), nums_rb, xl
        self.unshuffle_amount = 16 if xl else 8
        self.input_channels = cin // self.unshuffle_amount**2
        self.unshuffle = nn.PixelUnshuffle(self.unshuffle_amount)
        self.conv_in = nn.Conv2d(cin, channels[0], 3, padding=1)
        halving = {2} if xl else {1, 2, 3}
        self.body = nn.ModuleList()
        for level, width in enumerate(channels):
            for number in range(nums_rb):
                is_first = number == 0 and level > 0
                before = channels[level - 1] if is_first else width
                down = is_first and level in halving
                self.body.append(ResnetBlock(before, width, down, ksize, sk, use_conv))

    def forward(self, x: Tensor) -> Features:
        """Features of pictures ``[B, input_channels, H, W]``."""
        h = self.conv_in(self.unshuffle(x))
        levels = []
        for level in range(len(self.channels)):
            for block in self.body[level * self.nums_rb : (level + 1) * self.nums_rb]:
                h = block(h)
            levels.append(h)
        if not self.xl:
            return {"input": _after_two_blocks(levels)}
        first, second, third, last = levels
        placed = [None, None, None, first, None, second, None, None, third, None]
        return {"input": placed[::-1], "middle": [last]}


def _after_two_blocks(levels: Sequence[Tensor]) -> list[Tensor | None]:
    """Each level's features at its third block, last block first."""
    placed: list[Tensor | None] = []
    for features in levels:
        placed += [None, None, features]
    return placed[::-1]


class ResnetBlock_light(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, in_c: int) -> None:
        super().__init__()
        self.block1 = nn.Conv2d(in_c, in_c, 3, padding=1)
        self.act = nn.ReLU()
        self.block2 = nn.Conv2d(in_c, in_c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.block2(self.act(self.block1(x))) + x


class extractor(nn.Module):
    """One level of the light form: narrow, work, widen."""

    def __init__(
        self, in_c: int, inter_c: int, out_c: int, nums_rb: int, down: bool = False
    ) -> None:
        super().__init__()
        self.in_conv = nn.Conv2d(in_c, inter_c, 1)
        self.body = nn.Sequential(*(ResnetBlock_light(inter_c) for _ in range(nums_rb)))
        self.out_conv = nn.Conv2d(inter_c, out_c, 1)
        self.down_opt: nn.Module | None = Downsample(in_c, use_conv=False) if down else None

    def forward(self, x: Tensor) -> Tensor:
        if self.down_opt is not None:
            x = self.down_opt(x)
        return self.out_conv(self.body(self.in_conv(x)))


class Adapter_light(nn.Module):
    """The light form: a quarter of the channels inside."""

    def __init__(
        self, channels: Sequence[int] = (320, 640, 1280, 1280), nums_rb: int = 3, cin: int = 64
    ) -> None:
        super().__init__()
        self.channels, self.nums_rb, self.xl = list(channels), nums_rb, False
        self.unshuffle_amount = 8
        self.input_channels = cin // self.unshuffle_amount**2
        self.unshuffle = nn.PixelUnshuffle(self.unshuffle_amount)
        inputs = [cin, *channels[:-1]]
        self.body = nn.ModuleList(
            extractor(before, width // 4, width, nums_rb, down=level > 0)
            for level, (before, width) in enumerate(zip(inputs, channels))
        )

    def forward(self, x: Tensor) -> Features:
        """Features of pictures ``[B, input_channels, H, W]``."""
        h, levels = self.unshuffle(x), []
        for block in self.body:
            h = block(h)
            levels.append(h)
        return {"input": _after_two_blocks(levels)}
