"""Latents that a model is shown beside the one it makes, such as pictures to edit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def shown_latents(model: Any, references: Sequence[Tensor]) -> list[Tensor]:
    """Reference latents [B, C, ...] in the scale of a model's network.

    A picture's latent counts as the only moment of a video where the model's are of videos.

    Raises:
        ValueError: They are of an autoencoder with another number of channels or axes.
    """
    channels = model.latent_format.latent_channels
    axes = model.latent_format.latent_dimensions + 2
    shown = []
    for latent in references:
        moment = latent.unsqueeze(2) if axes == 5 and latent.ndim == 4 else latent
        if moment.ndim != axes or moment.shape[1] != channels:
            raise ValueError(
                f"reference_latents: expected latents with {channels} channels and {axes} axes, as "
                f"{type(model.model_config).__name__} has them, found the shape "
                f"{list(latent.shape)}; make them with the autoencoder (vae) of this model"
            )
        shown.append(model.process_latent_in(moment))
    return shown
