"""What the nodes for latents share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comfy_nodes.limits import MAX_RESOLUTION

Latent = dict[str, Any]
CELL = 8  # pixels per latent cell and axis


def pixels_input(default: int, least: int, step: int = CELL) -> tuple[str, dict[str, int]]:
    """Declaration of a size or position in pixels."""
    return ("INT", {"default": default, "min": least, "max": MAX_RESOLUTION, "step": step})


def replaced(latent: Latent, samples: Tensor) -> Latent:
    """The latent dict with other samples; all further entries stay."""
    return {**latent, "samples": samples}


def batch_indices(latent: Latent) -> list[int]:
    """Index of each item in the batch its noise is drawn for."""
    return list(latent.get("batch_index", range(latent["samples"].shape[0])))
