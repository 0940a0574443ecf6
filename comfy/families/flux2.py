"""FLUX.2: the blocks of FLUX over 128-channel latents, conditioned on Mistral Small 3."""
# ruff: noqa: RUF012 - class attributes are the facts of a family

from __future__ import annotations

from typing import Any

from comfy import latent_formats
from comfy.families import dit_model
from comfy.families.dit_layout import read_flux2_config
from comfy.families.family import ClipTarget, StateDict
from comfy.families.flux import Flux
from comfy.families.text_sizes import llm_dtype
from comfy.text_encoders.mistral import Flux2Tokenizer, flux2_clip

PIXELS_OF_CELL = 4  # cells of FLUX.1 in one of this latent
SHARE = 2.36  # of activations for such a cell


class Flux2(Flux):
    """FLUX.2."""

    unet_config: dict[str, Any] = {"image_model": "flux2"}
    read_config = staticmethod(read_flux2_config)
    sampling_settings = {"shift": 2.02}
    latent_format: Any = latent_formats.Flux2
    base_model = dit_model.Flux2

    def __init__(self, unet_config: dict[str, Any]) -> None:
        super().__init__(unet_config)
        self.memory_usage_factor *= PIXELS_OF_CELL * SHARE

    def clip_target(self, state_dict: StateDict | None = None) -> ClipTarget:
        """Mistral Small 3."""
        return ClipTarget(Flux2Tokenizer, flux2_clip(llm_dtype(state_dict)))
