"""Small files of model families, and what is done with them: written, sampled, saved and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from comfy import loading
from comfy.saving import save_checkpoint
from comfy_nodes.sampling import common_ksampler

PREFIX = "model.diffusion_model."


def write(tensors: dict[str, Tensor], path: Path) -> str:
    """A weight file; gives its path."""
    save_file({key: value.contiguous() for key, value in tensors.items()}, path)
    return str(path)


def prefixed(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + key: value for key, value in weights.items()}


def sampled(
    model: Any,
    clip: Any,
    shape: tuple[int, ...],
    mask: Tensor | None = None,
    fill: float = 0.0,
    **options: Any,
) -> Tensor:
    """Two steps from a latent of this shape, with a text and options of its conditioning."""
    [[cond, told]] = clip.encode_from_tokens_scheduled(clip.tokenize("a red cat"))
    positive = [[cond, {**told, **options}]]
    negative = clip.encode_from_tokens_scheduled(clip.tokenize(""))
    latent = {"samples": torch.full(shape, fill)}
    if mask is not None:
        latent["noise_mask"] = mask
    made = common_ksampler(model, 3, 2, 2.0, "euler", "simple", positive, negative, latent)
    samples: Tensor = made[0]["samples"]
    assert samples.isfinite().all()
    return samples


def loaded_again(found: Any, folder: Path) -> Any:
    """The same checkpoint, saved and read."""
    path = str(folder / "again.safetensors")
    save_checkpoint(path, found.model, found.clip, found.vae)
    return loading.load_checkpoint_guess_config(path, output_vae=found.vae is not None)
