"""Block-wise ControlNet of Qwen-Image: what it adds after a block depends on that block's result.

Source: https://github.com/modelscope/DiffSynth-Studio.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from comfy import ops
from comfy.ldm.common_dit import RMSNorm, pad_to_patch_size

PATCH = 2
LATENT_CHANNELS = 16


class BlockWiseControlBlock(nn.Module):
    """Picture's tokens and control's tokens, normed and added, through two linear layers."""

    def __init__(self, dim: int, operations: Any, **place: Any) -> None:
        super().__init__()
        self.x_rms = RMSNorm(dim, **place)
        self.y_rms = RMSNorm(dim, **place)
        self.input_proj = operations.Linear(dim, dim, **place)
        self.act = nn.GELU()
        self.output_proj = operations.Linear(dim, dim, **place)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.output_proj(self.act(self.input_proj(self.x_rms(x) + self.y_rms(y))))


class QwenImageBlockWiseControlNet(nn.Module):
    """A control block for each block of Qwen-Image.

    Args:
        num_layers: Number of blocks.
        in_channels: Channels of a control latent: 16, and one of a mask if it takes any.
        dim: Width of a token.
    """

    def __init__(
        self,
        num_layers: int = 60,
        in_channels: int = LATENT_CHANNELS,
        dim: int = 3072,
        dtype: Any = None,
        device: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.mask_channels = in_channels - LATENT_CHANNELS
        self.img_in = operations.Linear(in_channels * PATCH**2, dim, **place)
        self.controlnet_blocks = nn.ModuleList(
            BlockWiseControlBlock(dim, operations, **place) for _ in range(num_layers)
        )

    def process_input_latent_image(self, latent: Tensor) -> Tensor:
        """Tokens ``[B, L, D]`` of a control latent ``[B, C, T, H, W]`` in the network's scale."""
        padded = pad_to_patch_size(latent, (1, PATCH, PATCH))
        pattern = "b c t (h p) (w q) -> b (t h w) (c p q)"
        return self.img_in(rearrange(padded, pattern, p=PATCH, q=PATCH))

    def control_block(self, img: Tensor, control: Tensor, number: int) -> Tensor:
        """What is added to ``img [B, L, D]`` after a block."""
        made: Tensor = self.controlnet_blocks[number](img, control)
        return made

    @classmethod
    def sizes_of(cls, weights: dict[str, Tensor]) -> dict[str, int]:
        """Arguments of the constructor for a file's weights."""
        dim, inputs = weights["img_in.weight"].shape
        count = len({key.split(".")[1] for key in weights if key.startswith("controlnet_blocks.")})
        return {"num_layers": count, "in_channels": inputs // PATCH**2, "dim": dim}


def with_mask(latent: Tensor, mask: Tensor | None, channels: int) -> Tensor:
    """A latent ``[B, C, T, H, W]`` followed by what is known (1) and what is to be made (0).

    Args:
        mask: ``[B, 1, H, W]`` of the latent's size; None if all is known.
        channels: Channels the mask takes; 0 for none.
    """
    if not channels:
        return latent
    shape = (latent.shape[0], channels, *latent.shape[2:])
    known = torch.ones(shape).to(latent) if mask is None else mask[:, :, None].to(latent)
    return torch.cat([latent, known.expand(shape)], dim=1)
