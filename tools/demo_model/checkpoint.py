"""The single-file layout: which networks sit under which prefix."""

from __future__ import annotations

from torch import Tensor

UNET, AUTOENCODER, TEXT = (
    "model.diffusion_model.",
    "first_stage_model.",
    "cond_stage_model.transformer.",
)


def component(state_dict: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The float32 tensors under `prefix`, without it."""
    return {k[len(prefix) :]: v.float() for k, v in state_dict.items() if k.startswith(prefix)}
