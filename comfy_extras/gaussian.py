"""Gaussian filters over the rows and columns of tensors [B, C, H, W]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad


def gaussian_kernel(
    kernel_size: int, sigma: float, device: torch.device | str | None = None
) -> Tensor:
    """Weights [k, k] of a Gaussian on -1..1 in both directions, with sum 1."""
    line = torch.linspace(-1, 1, kernel_size, device=device)
    squared = line[:, None] ** 2 + line[None, :] ** 2
    weights = torch.exp(-squared / (2.0 * sigma * sigma))
    return weights / weights.sum()


def sharpening_kernel(radius: int, sigma: float, alpha: float) -> Tensor:
    """Weights that subtract the blurred picture, ten times `alpha` strong, with sum 1."""
    kernel = gaussian_kernel(radius * 2 + 1, sigma) * -(alpha * 10)
    kernel[radius, radius] += 1.0 - kernel.sum()
    return kernel


def filter_channels(tensor: Tensor, kernel: Tensor) -> Tensor:
    """Each channel filtered by one kernel; beyond the edges the tensor is mirrored.

    Args:
        tensor: [B, C, H, W], or a video's [B, C, T, H, W], filtered frame by frame.
    """
    if tensor.ndim == 5:
        frames = [filter_channels(frame, kernel) for frame in tensor.unbind(2)]
        return torch.stack(frames, dim=2)
    radius = kernel.shape[-1] // 2
    channels = tensor.shape[1]
    mode = "reflect" if radius < min(tensor.shape[-2:]) else "replicate"
    padded = pad(tensor, (radius, radius, radius, radius), mode)
    return conv2d(padded, kernel.expand(channels, 1, *kernel.shape), groups=channels)
