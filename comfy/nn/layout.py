"""Memory layout: where convolutional networks run faster with channels innermost."""

from __future__ import annotations

from torch import Tensor

from comfy.devices import precision


def prefers_channels_last(x: Tensor) -> bool:
    """Whether features ``[B, C, H, W]`` should be laid out with channels innermost.

    So on CPUs: norms and convolutions are faster there, and a transformer's tokens are then a view
    of the features. On accelerators the layout of the weights decides, which whoever loads them has
    chosen.
    """
    return x.ndim == 4 and x.device.type == "cpu" and precision.tunes_cpu()


def tokens_of(x: Tensor) -> Tensor:
    """Features ``[B, C, H, W]`` as tokens ``[B, H * W, C]``: a view when channels are innermost.

    Strides come out as those of a fresh tensor also for one item. Other ways to this view leave its
    stride along the batch arbitrary, and layers that follow then take the layout for another one.
    """
    batch, channels, height, width = x.shape
    return x.permute(0, 2, 3, 1).reshape(batch, height * width, channels)


def tokens_of_patches(x: Tensor) -> Tensor:
    """Embedded patches ``[B, D, ...]`` as tokens ``[B, L, D]``, the channels of each side by side.

    Convolutions over frames leave positions innermost. A transformer would keep that order from
    layer to layer, since sums follow it, and every norm would copy its input.
    """
    return x.flatten(2).transpose(1, 2).contiguous()


def features_of(tokens: Tensor, height: int, width: int) -> Tensor:
    """Tokens ``[B, H * W, C]`` as features ``[B, C, H, W]`` with channels innermost."""
    return tokens.unflatten(1, (height, width)).permute(0, 3, 1, 2)
