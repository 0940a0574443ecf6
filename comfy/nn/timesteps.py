"""Sinusoidal embeddings of the diffusion timestep."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def timestep_embedding(
    timesteps: Tensor, dim: int, max_period: float = 10000, repeat_only: bool = False
) -> Tensor:
    """Embed timesteps t [B] as ``[cos(w_i t), sin(w_i t)]`` with ``w_i = max_period^(-i / (dim //
    2))``.

    Returns float32 ``[B, dim]``; an odd dim is padded with zeros. With ``repeat_only`` every column
    is t itself.
    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 3.5.
    """
    if repeat_only:
        return timesteps[:, None].expand(-1, dim)
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=timesteps.device)
    # In this order, so that float32 rounds as it did in training: times reach 1000.
    frequencies = torch.exp(-math.log(max_period) * steps / half)
    angles = timesteps[:, None].float() * frequencies
    parts = [angles.cos(), angles.sin()]
    if dim % 2:
        parts.append(torch.zeros_like(angles[:, :1]))
    return torch.cat(parts, dim=-1)
