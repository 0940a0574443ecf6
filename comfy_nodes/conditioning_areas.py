"""Nodes that restrict conditioning: where in the picture it applies, and in which steps."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import node_helpers
from comfy_nodes.limits import MAX_RESOLUTION

Conditioning = list[list[Any]]
STRENGTH = ("FLOAT", {"default": 1.0, "min": 0.0, "max": 10.0, "step": 0.01})


class ConditioningSetArea:
    """Restricts a conditioning to a rectangle in pixels."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        side = {"default": 64, "min": 64, "max": MAX_RESOLUTION, "step": 8}
        corner = {"default": 0, "min": 0, "max": MAX_RESOLUTION, "step": 8}
        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                "width": ("INT", side),
                "height": ("INT", side),
                "x": ("INT", corner),
                "y": ("INT", corner),
                "strength": STRENGTH,
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "append"
    CATEGORY = "conditioning"

    def append(
        self, conditioning: Conditioning, width: int, height: int, x: int, y: int, strength: float
    ) -> tuple[Conditioning]:
        """Sets the area as (height, width, y, x) in latent cells of 8 pixels."""
        area = (height // 8, width // 8, y // 8, x // 8)
        return (_with_area(conditioning, area, strength),)


class ConditioningSetAreaPercentage:
    """Restricts a conditioning to a rectangle in fractions of the picture."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        side = {"default": 1.0, "min": 0, "max": 1.0, "step": 0.01}
        corner = {"default": 0, "min": 0, "max": 1.0, "step": 0.01}
        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                "width": ("FLOAT", side),
                "height": ("FLOAT", side),
                "x": ("FLOAT", corner),
                "y": ("FLOAT", corner),
                "strength": STRENGTH,
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "append"
    CATEGORY = "conditioning"

    def append(
        self,
        conditioning: Conditioning,
        width: float,
        height: float,
        x: float,
        y: float,
        strength: float,
    ) -> tuple[Conditioning]:
        """Sets the area as fractions; the sampler turns them into cells."""
        return (_with_area(conditioning, ("percentage", height, width, y, x), strength),)


class ConditioningSetAreaStrength:
    """Changes the weight of a conditioning's area."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"conditioning": ("CONDITIONING",), "strength": STRENGTH}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "append"
    CATEGORY = "conditioning"

    def append(self, conditioning: Conditioning, strength: float) -> tuple[Conditioning]:
        """Sets the weight only."""
        return (node_helpers.conditioning_set_values(conditioning, {"strength": strength}),)


class ConditioningSetMask:
    """Restricts a conditioning to a mask."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                "mask": ("MASK",),
                "strength": STRENGTH,
                "set_cond_area": (["default", "mask bounds"],),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "append"
    CATEGORY = "conditioning"

    def append(
        self, conditioning: Conditioning, mask: Tensor, set_cond_area: str, strength: float
    ) -> tuple[Conditioning]:
        """Sets mask, its weight, and whether only the mask's bounding box is computed."""
        values = {
            "mask": mask if mask.ndim > 2 else mask.unsqueeze(0),
            "set_area_to_bounds": set_cond_area != "default",
            "mask_strength": strength,
        }
        return (node_helpers.conditioning_set_values(conditioning, values),)


class ConditioningSetTimestepRange:
    """Restricts a conditioning to part of the sampling."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        def fraction(default: float) -> tuple[str, dict[str, float]]:
            return ("FLOAT", {"default": default, "min": 0.0, "max": 1.0, "step": 0.001})

        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                "start": fraction(0.0),
                "end": fraction(1.0),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "set_range"
    CATEGORY = "advanced/conditioning"

    def set_range(
        self, conditioning: Conditioning, start: float, end: float
    ) -> tuple[Conditioning]:
        """Sets start and end as fractions of the noise schedule, 0 being pure noise."""
        values = {"start_percent": start, "end_percent": end}
        return (node_helpers.conditioning_set_values(conditioning, values),)


def _with_area(conditioning: Conditioning, area: tuple[Any, ...], strength: float) -> Conditioning:
    values = {"area": area, "strength": strength, "set_area_to_bounds": False}
    return node_helpers.conditioning_set_values(conditioning, values)
