"""LoRA keys of the convolutional UNets: our own names, and diffusers names in several spellings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from comfy.weights.diffusers_unet import unet_to_diffusers

WEIGHT = ".weight"
NETWORK = "diffusion_model."


def own_names(keys: Iterable[str]) -> dict[str, str]:
    """Every network weight under its own name; a matrix also as `lora_unet_<underscored>`."""
    names: dict[str, str] = {}
    for key in keys:
        if not key.startswith(NETWORK):
            continue
        if not key.endswith(WEIGHT):
            names[key] = key
            continue
        stem = key[: -len(WEIGHT)]
        names["lora_unet_" + stem[len(NETWORK) :].replace(".", "_")] = key
        names[stem] = key
    return names


def diffusers_names(unet_config: Mapping[str, Any]) -> dict[str, str]:
    """diffusers names of UNet matrices: trainer, LyCORIS, and attention-processor spellings."""
    names: dict[str, str] = {}
    for theirs, ours in unet_to_diffusers(unet_config).items():
        if not theirs.endswith(WEIGHT):
            continue
        target, stem = NETWORK + ours, theirs[: -len(WEIGHT)]
        flat = stem.replace(".", "_")
        names["lora_unet_" + flat] = target
        names["lycoris_" + flat] = target
        processor = stem.replace(".to_", ".processor.to_")
        if processor.endswith(".to_out.0"):
            processor = processor[:-2]
        names[processor] = target
        names["unet." + processor] = target
    return names
