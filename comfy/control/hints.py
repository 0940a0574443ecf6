"""Pictures as control networks take them."""

from __future__ import annotations

import torch
from torch import Tensor

COLOURS = 3


def with_channels(hint: Tensor, wanted: int | None) -> Tensor:
    """A hint [B, C, H, W] with as many channels as a network takes (None: as it is).

    Transparency is left out; a grey picture has the same value in all colours, and where one
    channel is wanted it holds the mean of the colours.

    Raises:
        ValueError: It is no picture of numbers, or the network wants something else than colours.
    """
    if hint.ndim != 4:
        raise ValueError(
            "image: expected pictures [batch, height, width, channels] as a hint, found a tensor "
            f"of {hint.ndim} axes; a node before this one gave something that is no picture"
        )
    if not hint.is_floating_point():
        raise ValueError(
            f"image: expected pictures of real numbers 0..1 as a hint, found {hint.dtype}; a node "
            "before this one gave something that is no picture"
        )
    found = hint.shape[1]
    if wanted is None or found == wanted:
        return hint
    if wanted == COLOURS:
        return hint[:, :COLOURS] if found > COLOURS else hint[:, :1].expand(-1, COLOURS, -1, -1)
    if wanted == 1:
        return torch.mean(hint[:, :COLOURS], dim=1, keepdim=True)
    raise ValueError(
        f"image: expected a hint of {wanted} channels, as this control network takes them, found "
        f"{found}; make it with the preprocessor of this network"
    )
