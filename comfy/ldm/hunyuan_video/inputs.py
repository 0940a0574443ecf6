"""What HunyuanImage 2.1 and HunyuanVideo 1.5 let over further inputs before their own layers: texts
to be written into a picture, and what an image encoder saw.

Source: the HunyuanVideo-1.5 report, https://arxiv.org/abs/2511.18870, and its repository.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

BYT5_WIDTH, BYT5_INNER = 1472, 2048
Parts = dict[str, Any]


def _place(parts: Parts) -> Parts:
    return {"dtype": parts["dtype"], "device": parts["device"]}


class ByT5Mapper(nn.Module):
    """States of ByT5 ``[B, L, 1472]`` to tokens ``[B, L, D]``."""

    def __init__(self, width: int, parts: Parts, channels: int = BYT5_WIDTH) -> None:
        super().__init__()
        operations, place = parts["operations"], _place(parts)
        self.layernorm = operations.LayerNorm(channels, **place)
        self.fc1 = operations.Linear(channels, BYT5_INNER, **place)
        self.fc2 = operations.Linear(BYT5_INNER, BYT5_INNER, **place)
        self.fc3 = operations.Linear(BYT5_INNER, width, **place)
        self.act_fn = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.act_fn(self.fc1(self.layernorm(x)))
        return self.fc3(self.act_fn(self.fc2(h)))


class VisionProjection(nn.Module):
    """States of an image encoder ``[B, L, V]`` to tokens ``[B, L, D]``."""

    def __init__(self, channels: int, width: int, parts: Parts) -> None:
        super().__init__()
        operations, place = parts["operations"], _place(parts)
        self.proj = nn.Sequential(
            operations.LayerNorm(channels, **place),
            operations.Linear(channels, channels, **place),
            nn.GELU(),
            operations.Linear(channels, width, **place),
            operations.LayerNorm(width, **place),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x)
