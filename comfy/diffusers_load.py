"""Models in the folder layout of the diffusers library: one folder for each part."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from comfy import loading, text_loading
from comfy.vae.vae import VAE
from comfy.weights.errors import MissingWeightFileError
from comfy.weights.state_dict import load_torch_file

INDEX = "model_index.json"  # marks the folder of a whole model

# File names in the order in which they are looked for.
NETWORK_FILES = (
    "diffusion_pytorch_model.fp16.safetensors",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.fp16.bin",
    "diffusion_pytorch_model.bin",
)
TEXT_FILES = (
    "model.fp16.safetensors",
    "model.safetensors",
    "pytorch_model.fp16.bin",
    "pytorch_model.bin",
)


def first_file(path: str, filenames: Iterable[str]) -> str | None:
    """Path of the first of some files that is in a folder; None if none is."""
    paths = (os.path.join(path, name) for name in filenames)
    return next((found for found in paths if os.path.isfile(found)), None)


def part_file(model_path: str, part: str, filenames: Iterable[str]) -> str:
    """The weights of one part.

    Raises:
        MissingWeightFileError: The part's folder holds none of the usual files.
    """
    folder = os.path.join(model_path, part)
    found = first_file(folder, filenames)
    if found is None:
        raise MissingWeightFileError(folder, f"holds none of {', '.join(filenames)}")
    return found


def load_diffusers(
    model_path: str,
    output_vae: bool = True,
    output_clip: bool = True,
    embedding_directory: Any = None,
) -> tuple[Any, Any, Any]:
    """Diffusion model, text encoder and autoencoder of a model folder; None for an unwanted part.

    Raises:
        WeightFileError: A part is missing, or cannot be loaded.
    """
    model = loading.load_diffusion_model(part_file(model_path, "unet", NETWORK_FILES))
    clip = vae = None
    if output_clip:
        paths = [part_file(model_path, "text_encoder", TEXT_FILES)]
        second = first_file(os.path.join(model_path, "text_encoder_2"), TEXT_FILES)
        paths += [] if second is None else [second]
        clip = text_loading.load_clip(paths, embedding_directory=embedding_directory)
    if output_vae:
        path = part_file(model_path, "vae", NETWORK_FILES)
        state_dict, metadata = load_torch_file(path, return_metadata=True)
        with loading.naming(path):
            vae = VAE(sd=state_dict, metadata=metadata)
    return (model, clip, vae)
