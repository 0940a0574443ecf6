"""USO: the style of a picture as tokens before FLUX's text.

Source: Wu et al. 2025, https://arxiv.org/abs/2508.18966.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from comfy import ops

LEVELS = ("low", "mid", "high")  # how deep in the image encoder the states come from


class SigLIPMultiFeatProjModel(nn.Module):
    """Three layers of an image encoder's states, each turned into a few tokens.

    Args:
        siglip_token_nums: Places of a picture in the image encoder.
        style_token_nums: Tokens made of one layer.
        siglip_token_dims: Width of the image encoder.
        hidden_size: Width of a token in FLUX.
        context_layer_norm: Whether states pass a norm before the projection.
    """

    def __init__(
        self,
        siglip_token_nums: int = 729,
        style_token_nums: int = 64,
        siglip_token_dims: int = 1152,
        hidden_size: int = 3072,
        context_layer_norm: bool = True,
        device: Any = None,
        dtype: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype}
        for level in LEVELS:
            embedding = operations.Linear(siglip_token_nums, style_token_nums, **place)
            norm: nn.Module = nn.Identity()
            if context_layer_norm:
                norm = operations.LayerNorm(siglip_token_dims, **place)
            projection = operations.Linear(siglip_token_dims, hidden_size, **place)
            self.add_module(f"{level}_embedding_linear", nn.Sequential(embedding, nn.SiLU()))
            self.add_module(f"{level}_layer_norm", norm)
            self.add_module(f"{level}_projection", projection)

    def forward(self, siglip_outputs: Tensor) -> Tensor:
        """States [3, B, L, D] (low, middle, high) -> tokens [B, 3 * style tokens, hidden_size]."""
        made = {level: self._tokens(level, states) for level, states in zip(LEVELS, siglip_outputs)}
        return torch.cat([made[level] for level in reversed(LEVELS)], dim=1)

    def _tokens(self, level: str, states: Tensor) -> Tensor:
        fewer = self.get_submodule(f"{level}_embedding_linear")(states.transpose(1, 2))
        normed = self.get_submodule(f"{level}_layer_norm")(fewer.transpose(1, 2))
        return self.get_submodule(f"{level}_projection")(normed)
