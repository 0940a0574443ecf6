"""Nodes that lay one latent over another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy import resize
from comfy_nodes.latent_basics import CELL, Latent, check_alike, pixels_input, replaced
from comfy_nodes.picture_basics import check_count


class LatentComposite:
    """Pastes one latent into another."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "samples_to": ("LATENT",),
                "samples_from": ("LATENT",),
                "x": pixels_input(0, 0),
                "y": pixels_input(0, 0),
                "feather": pixels_input(0, 0),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "composite"
    CATEGORY = "latent"

    def composite(
        self,
        samples_to: Latent,
        samples_from: Latent,
        x: int,
        y: int,
        composite_method: str = "normal",  # noqa: ARG002 - public signature
        feather: int = 0,
    ) -> tuple[Latent]:
        """`samples_from` at (x, y); edges that lie inside the picture fade over `feather`
        pixels.
        """
        x, y, feather = x // CELL, y // CELL, feather // CELL
        target = samples_to["samples"].clone()
        check_alike(target.shape, samples_from["samples"], "samples_from")
        source = resize.repeat_to_batch_size(samples_from["samples"], target.shape[0])
        source = source[..., : max(0, target.shape[-2] - y), : max(0, target.shape[-1] - x)]
        if 0 in source.shape:
            return (replaced(samples_to, target),)
        rows, columns = source.shape[-2:]
        mask = _feathered(source, feather, x, y, target.shape[-2:])
        window = (..., slice(y, y + rows), slice(x, x + columns))
        target[window] = source * mask + target[window] * (1.0 - mask)
        return (replaced(samples_to, target),)


class LatentBlend:
    """Mixes two latents."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        factor = {"default": 0.5, "min": 0, "max": 1, "step": 0.01}
        return {
            "required": {
                "samples1": ("LATENT",),
                "samples2": ("LATENT",),
                "blend_factor": ("FLOAT", factor),
            }
        }

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "blend"
    CATEGORY = "_for_testing"

    def blend(
        self, samples1: Latent, samples2: Latent, blend_factor: float, blend_mode: str = "normal"
    ) -> tuple[Latent]:
        """samples1 * factor + samples2 * (1 - factor).

        Raises:
            ValueError: `blend_mode` is not "normal".
        """
        if blend_mode != "normal":
            raise ValueError(f"unknown blend mode {blend_mode!r}; known: normal")
        first, second = samples1["samples"], samples2["samples"]
        if first.shape != second.shape:
            check_alike(first.shape, second, "samples2")
            if first.shape[0] > 1:
                check_count(second.shape[0], first.shape[0], "latent", "samples2", "samples1")
            columns, rows = first.shape[-1], first.shape[-2]
            second = resize.common_upscale(second, columns, rows, "bicubic", "center")
        return (replaced(samples1, first * blend_factor + second * (1 - blend_factor)),)


def _feathered(
    source: Tensor, feather: int, x: int, y: int, target_size: tuple[int, ...]
) -> Tensor:
    """Weight of `source` placed at (x, y): 1, falling off over `feather` cells at inner edges."""
    mask = torch.ones_like(source)
    rows, columns = source.shape[-2:]
    for step in range(feather):
        weight = (step + 1) / feather
        if y != 0 and step < rows:
            mask[..., step, :] *= weight
        if y + rows < target_size[0] and step < rows:
            mask[..., rows - 1 - step, :] *= weight
        if x != 0 and step < columns:
            mask[..., :, step] *= weight
        if x + columns < target_size[1] and step < columns:
            mask[..., :, columns - 1 - step] *= weight
    return mask
