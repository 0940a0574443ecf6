"""Layers of Chroma: the maker of its modulation, and a last layer that is given it.

The blocks are those of FLUX and can be imported from here, too.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from comfy.ldm.flux.layers import (
    DoubleStreamBlock,
    LastLayer,
    MLPEmbedder,
    RMSNorm,
    SingleStreamBlock,
    apply_mod,
)

__all__ = ["Approximator", "DoubleStreamBlock", "ModulatedLastLayer", "SingleStreamBlock"]


class Approximator(nn.Module):
    """Residual layers that make a modulation vector of time, guidance and its place."""

    def __init__(
        self, in_dim: int, out_dim: int, hidden_dim: int, layers: int, operations: Any, **place: Any
    ) -> None:
        super().__init__()
        parts = {"operations": operations, **place}
        self.in_proj = operations.Linear(in_dim, hidden_dim, **place)
        self.layers = nn.ModuleList(
            MLPEmbedder(hidden_dim, hidden_dim, **parts) for _ in range(layers)
        )
        self.norms = nn.ModuleList(RMSNorm(hidden_dim, **parts) for _ in range(layers))
        self.out_proj = operations.Linear(hidden_dim, out_dim, **place)

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_proj(x)
        for layer, norm in zip(self.layers, self.norms):
            x = x + layer(norm(x))
        return self.out_proj(x)


class ModulatedLastLayer(LastLayer):
    """The last layer with shift and scale given."""

    def __init__(self, *sizes: Any, **parts: Any) -> None:
        super().__init__(*sizes, **parts)
        del self.adaLN_modulation

    def forward(self, x: Tensor, vec: Tensor, modulation_dims: Any = None) -> Tensor:
        """``vec [B, M, D]`` ends with shift and scale."""
        shift, scale = vec[:, -2:-1], vec[:, -1:]
        made: Tensor = self.linear(apply_mod(self.norm_final(x), 1 + scale, shift, modulation_dims))
        return made
