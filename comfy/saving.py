"""Writes a model, with text encoder and autoencoder if wanted, as one checkpoint file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from comfy.devices import residency
from comfy.weights.state_dict import save_torch_file


def save_checkpoint(
    output_path: str,
    model: Any,
    clip: Any = None,
    vae: Any = None,
    clip_vision: Any = None,
    metadata: Mapping[str, str] | None = None,
    extra_keys: Mapping[str, Tensor] | None = None,
) -> None:
    """Saves the weights as their patches make them, in the layout of the model's family.

    Args:
        output_path: File to write; replaced only when complete.
        model: Model patcher.
        clip: CLIP or None.
        vae: VAE or None.
        clip_vision: Image encoder or None.
        metadata: Text for the file's header.
        extra_keys: Further tensors.
    """
    views = [model] if clip is None else [model, clip.load_model()]
    residency.load_models_gpu(views, force_patch_weights=True)
    tensors = model.model.state_dict_for_saving(
        None if clip is None else clip.get_sd(),
        None if vae is None else vae.get_sd(),
        None if clip_vision is None else clip_vision.get_sd(),
    )
    save_torch_file({**tensors, **(extra_keys or {})}, output_path, metadata=metadata)
