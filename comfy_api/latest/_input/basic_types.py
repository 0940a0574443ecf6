"""Names for the values of common inputs, for annotations.

`ImageInput` is a tensor `[B, H, W, C]` and `MaskInput` a tensor `[B, H, W]`, both float32 in 0..1;
they are looked up when used, so that this module loads without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfy_api.latest.io.sockets import AudioContents, LatentContents

if TYPE_CHECKING:
    from torch import Tensor

    ImageInput = Tensor
    MaskInput = Tensor

AudioInput = AudioContents
LatentInput = LatentContents


def __getattr__(name: str) -> Any:
    if name in ("ImageInput", "MaskInput"):
        import torch

        return torch.Tensor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
