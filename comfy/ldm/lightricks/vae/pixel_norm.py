"""The norm of LTX video's autoencoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PixelNorm(nn.Module):
    """Division by the root mean square over an axis."""

    def __init__(self, dim: int = 1, eps: float = 1e-8) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=self.dim, keepdim=True) + self.eps)
