"""The autoencoder of models that work on pixels: it changes nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PixelspaceConversionVAE(nn.Module):
    """Latents are pictures in -1..1.

    Attributes:
        pixel_space_vae: The one weight by which a state dict names this kind; it is not used.
    """

    def __init__(self, dtype: torch.dtype | None = None, device: Any = None) -> None:
        super().__init__()
        self.pixel_space_vae = nn.Parameter(torch.ones((), dtype=dtype, device=device))

    def encode(self, pixels: Tensor, **kwargs: Any) -> Tensor:  # noqa: ARG002 - common signature
        """The pictures themselves."""
        return pixels

    def decode(self, latent: Tensor, **kwargs: Any) -> Tensor:  # noqa: ARG002 - common signature
        """A copy of the latents: what turns it into pictures works in place."""
        return latent.clone()
