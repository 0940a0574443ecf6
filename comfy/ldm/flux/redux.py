"""Redux: image encoder states as tokens beside FLUX's text."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from comfy import ops


class ReduxImageEncoder(nn.Module):
    """Two layers from the states of an image encoder to text tokens.

    Args:
        redux_dim: Width of the image encoder.
        txt_in_features: Width of a text token.
    """

    def __init__(
        self,
        redux_dim: int = 1152,
        txt_in_features: int = 4096,
        device: Any = None,
        dtype: Any = None,
        operations: Any = ops.manual_cast,
    ) -> None:
        super().__init__()
        place = {"device": device, "dtype": dtype}
        inner = txt_in_features * 3
        self.redux_up = operations.Linear(redux_dim, inner, **place)
        self.redux_down = operations.Linear(inner, txt_in_features, **place)

    def forward(self, sigclip_embeds: Tensor) -> Tensor:
        """States [B, L, redux_dim] -> tokens [B, L, txt_in_features]."""
        return self.redux_down(functional.silu(self.redux_up(sigclip_embeds)))
