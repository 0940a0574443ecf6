"""Which names LoRA files use for a model's weights.

A layout turns (state-dict keys, network configuration) into file key -> target; a target is a key
or (key, offset, function) for a slice of a weight. Layouts that do not concern a model give
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from comfy.weights.lora_formats.clip import clip_names, encoder_names, t5_names
from comfy.weights.lora_formats.transformers import (
    ace_step_decoder_names,
    flux_packed_names,
    hunyuan_video_names,
    library_names,
    prefixed_own_names,
)
from comfy.weights.lora_formats.unet import diffusers_names, own_names

Target = str | tuple[Any, ...]
Layout = Callable[[Collection[str], Mapping[str, Any]], dict[str, Any]]

NETWORK_LAYOUTS: list[Layout] = [
    lambda keys, _config: own_names(keys),
    lambda _keys, config: diffusers_names(config),
    library_names,
    prefixed_own_names,
    ace_step_decoder_names,
    flux_packed_names,
    hunyuan_video_names,
]
"""Layouts of diffusion networks; later ones win where names meet."""

ENCODER_LAYOUTS: list[Layout] = [
    lambda keys, _config: encoder_names(keys),
    lambda keys, _config: clip_names(keys),
    lambda keys, _config: t5_names(keys),
]
"""Layouts of text encoders; later ones win where names meet."""
