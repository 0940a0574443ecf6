"""Latents that a model is shown beside the one it makes, such as pictures to edit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from comfy import conds


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


def reference_conds(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of a network that is shown reference latents: these, and how they are laid out."""
    references, method = given.get("reference_latents"), given.get("reference_latents_method")
    if references is None:
        return {}
    made: dict[str, Any] = {"ref_latents": conds.CONDList(shown_latents(model, references))}
    if method is not None:
        made["ref_latents_method"] = conds.CONDConstant(method)
    return made


def reference_shapes(model: Any, given: Mapping[str, Any]) -> dict[str, list[int]]:
    """For estimates of memory: reference latents weigh like one latent of their joint size."""
    references = given.get("reference_latents")
    if references is None:
        return {}
    channels = model.latent_format.latent_channels
    cells = sum(math.prod(latent.shape) for latent in references) // channels
    return {"ref_latents": [1, channels, cells]}
