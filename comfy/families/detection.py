"""Finds out which model family a state dict belongs to, from its keys and shapes alone."""

# ruff: noqa: ARG001 - public signatures

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from comfy.families import MODEL_FAMILIES, diffusers_layout
from comfy.families.family import ModelFamily, StateDict
from comfy.weights.diffusers_mmdit import convert_diffusers_mmdit
from comfy.weights.header_hints import read_hints

# Where checkpoints keep the diffusion network, and how many keys must be there to believe it.
UNET_PREFIXES = ("model.diffusion_model.", "model.model.", "net.")
FEWEST_KEYS = 5
OTHER_PREFIX = "model."


def unet_prefix_from_state_dict(state_dict: Mapping[str, Any]) -> str:
    """Prefix of the diffusion network's keys: the candidate with the most keys, else `model.`."""
    counts = Counter(
        prefix for key in state_dict for prefix in UNET_PREFIXES if key.startswith(prefix)
    )
    if not counts:
        return OTHER_PREFIX
    prefix, count = counts.most_common(1)[0]
    return prefix if count > FEWEST_KEYS else OTHER_PREFIX


def detect_unet_config(
    state_dict: Mapping[str, Tensor],
    key_prefix: str,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Configuration that the first fitting layout reads from keys and shapes; None if none fits.

    Raises:
        BrokenModelError: A layout fits, but weights that decide sizes are missing or contradictory.
    """
    for read_config in dict.fromkeys(family.read_config for family in MODEL_FAMILIES):
        config = read_config(state_dict, key_prefix)
        if config is not None:
            return config
    return None


def model_config_from_unet_config(
    unet_config: dict[str, Any], state_dict: Mapping[str, Tensor] | None = None
) -> ModelFamily | None:
    """Instance of the first family that a configuration matches; None if none does."""
    for family in MODEL_FAMILIES:
        if family.matches(unet_config, state_dict):
            return family(unet_config)
    return None


def model_config_from_unet(
    state_dict: Mapping[str, Tensor],
    unet_key_prefix: str,
    use_base_if_no_match: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> ModelFamily | None:
    """The family of the diffusion network in a state dict, configured for it.

    Args:
        state_dict: The whole file, or the network's part of it.
        unet_key_prefix: Prefix of the network's keys.
        use_base_if_no_match: Describe an unknown family by the configuration alone instead of
            giving None.
        metadata: The file's header, which may tell head and group counts.
    """
    config = detect_unet_config(state_dict, unet_key_prefix, metadata)
    if config is None:
        return None
    family = model_config_from_unet_config(config, state_dict)
    if family is None:
        return ModelFamily(config) if use_base_if_no_match else None
    apply_hints(family, read_hints(metadata, "unet_config"))
    family.read_header(metadata)
    return family


def unet_config_from_diffusers_unet(
    state_dict: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> dict[str, Any] | None:
    """Configuration of a UNet under the names of the diffusers library; None for another file."""
    config = diffusers_layout.read_config(state_dict)
    return config if config is None else {**config, "dtype": dtype}


def from_diffusers(
    state_dict: StateDict, metadata: Mapping[str, str] | None = None
) -> tuple[ModelFamily, StateDict] | None:
    """Family and weights, under their usual names, of a network file of the diffusers library.

    Returns:
        None for a file in another layout or of no known family.
    """
    transformer = convert_diffusers_mmdit(state_dict)
    if transformer is not None:
        found = model_config_from_unet(transformer, "", metadata=metadata)
        return None if found is None else (found, transformer)
    config = diffusers_layout.read_config(state_dict)
    family = None if config is None else model_config_from_unet_config(config)
    if config is None or family is None:
        return None
    apply_hints(family, read_hints(metadata, "unet_config"))
    return family, diffusers_layout.to_native(state_dict, config)


def apply_hints(family: ModelFamily, hints: Mapping[str, int]) -> None:
    """Puts head and group counts of a file's header above the usual values of the family."""
    if "num_heads" in hints or "num_head_channels" in hints:
        family.unet_config.update({"num_heads": -1, "num_head_channels": -1})
    family.unet_config.update(hints)


def supported_titles() -> list[str]:
    """Names of the families that can be loaded, for messages."""
    return [family.title() for family in MODEL_FAMILIES]
