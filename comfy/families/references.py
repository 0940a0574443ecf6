"""Latents that a model is shown beside the one it makes, such as pictures to edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def shown_latents(model: Any, references: Sequence[Tensor]) -> list[Tensor]:
    """Reference latents [B, C, ...] in the scale of a model's network.

    Raises:
        ValueError: They are of an autoencoder with another number of channels.
    """
    channels = model.latent_format.latent_channels
    for latent in references:
        if latent.ndim < 4 or latent.shape[1] != channels:
            raise ValueError(
                f"reference_latents: expected latents with {channels} channels, as "
                f"{type(model.model_config).__name__} has them, found the shape "
                f"{list(latent.shape)}; make them with the autoencoder (vae) of this model"
            )
    return [model.process_latent_in(latent) for latent in references]
