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
