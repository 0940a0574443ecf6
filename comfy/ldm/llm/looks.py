"""Where tokens are and what they see: rotations of queries and keys, masks of scores."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from comfy.devices import memory
from comfy.ldm.llm.config import LLMConfig

MASK_COPIES = 2  # of a mask, which live at once while it is made


def rotations(
    places: Tensor, config: LLMConfig, dtype: torch.dtype, is_near: bool = False
) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[L, D]`` of places; the halves of a head turn together.

    Args:
        places: ``[L]``, or ``[3, L]`` in time, height and width.
        is_near: Whether they are for layers that see near tokens only.
    """
    theta, scale = config.waves(is_near)
    powers = torch.arange(0, config.turned, 2, device=places.device).float() / config.turned
    angles = places.float()[..., None] * (1.0 / theta**powers / scale)
    if angles.ndim == 3:
        axes = _axes(config).to(angles.device)
        angles = angles.gather(0, axes.expand(1, *angles.shape[1:]))[0]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _axes(config: LLMConfig) -> Tensor:
    """Of each angle of a head, whether it follows time, height or width (0, 1, 2)."""
    dims = list(config.rope_dims or ())
    if not config.rope_interleaved:
        return torch.arange(len(dims)).repeat_interleave(torch.tensor(dims))
    axes = torch.zeros(sum(dims), dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * dims[axis] : 3] = axis
    return axes


def rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Turn ``x [B, heads, L, D]``: its first half with its second; channels for which there are no
    angles stay.
    """
    width = turn[0].shape[-1]
    if width < x.shape[-1]:
        return torch.cat([rotate(x[..., :width], turn), x[..., width:]], dim=-1)
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat([-second, first], dim=-1) * turn[1]


def mask_of(x: Tensor, attention_mask: Tensor | None, window: int = 0) -> Tensor:
    """What is added to scores ``[B or 1, 1, L, L]``: nothing later and no padding is seen, and of
    what was before a window of the latest tokens (0: all).
    """
    length = x.shape[1]
    memory.require_room_for_pairs(length, "the mask of a text", x.device, x.dtype, MASK_COPIES)
    later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    hidden = later[None, None]
    if 0 < window < length:
        hidden = hidden | torch.ones_like(later).tril(-window)[None, None]
    if attention_mask is not None:
        hidden = hidden | (attention_mask == 0).to(x.device)[:, None, None, :]
    mask = torch.zeros(hidden.shape, dtype=x.dtype, device=x.device)
    return mask.masked_fill_(hidden, torch.finfo(x.dtype).min / 4)


def mask_behind(
    x: Tensor, past: int, window: int, blocks: Sequence[tuple[int, int]]
) -> Tensor | None:
    """What is added to scores ``[1, 1, L, past + L]`` of tokens behind others; None where they see
    everything.
    """
    length = x.shape[1]
    if length == 1 and (not window or past < window):
        return None
    whole = past + length
    memory.require_room_for_pairs(whole, "the mask of a text", x.device, x.dtype, MASK_COPIES)
    own = torch.arange(past, whole, device=x.device)[:, None]
    seen = torch.arange(whole, device=x.device)[None]
    hidden = seen > own
    if window:
        hidden = hidden | (seen <= own - window)
    for start, end in blocks:
        hidden[start:end, past + start : past + end] = False
    mask = torch.zeros(1, 1, *hidden.shape, dtype=x.dtype, device=x.device)
    return mask.masked_fill_(hidden, torch.finfo(x.dtype).min / 4)
