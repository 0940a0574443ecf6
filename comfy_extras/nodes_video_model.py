"""Guidance and areas of video models whose batch axis is time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import node_helpers
from comfy_nodes.conditioning import Conditioning


def guided_by_frame(args: dict[str, Any], scales: Tensor) -> Tensor:
    """Classifier-free guidance with a scale [frames] for each item of the batch."""
    cond, uncond = args["cond"], args["uncond"]
    scales = scales.reshape(cond.shape[0], *(1,) * (cond.ndim - 1))
    return uncond + scales * (cond - uncond)


def linear_scales(args: dict[str, Any], min_cfg: float) -> Tensor:
    """From min_cfg at the first frame to the full scale at the last."""
    cond = args["cond"]
    return torch.linspace(min_cfg, args["cond_scale"], cond.shape[0], device=cond.device)


def triangle_scales(args: dict[str, Any], min_cfg: float) -> Tensor:
    """From min_cfg up to the full scale in the middle and back."""
    cond = args["cond"]
    place = torch.linspace(0, 1, cond.shape[0], device=cond.device)
    rise = 2 * (place - torch.floor(place + 0.5)).abs()
    return rise * (args["cond_scale"] - min_cfg) + min_cfg


class VideoLinearCFGGuidance:
    """Weaker guidance for the first frames, which the given picture guides already.

    Source: Blattmann et al. 2023, https://arxiv.org/abs/2311.15127, appendix D.
    """

    scales = staticmethod(linear_scales)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        options = {"default": 1.0, "min": 0.0, "max": 100.0, "step": 0.5, "round": 0.01}
        return {"required": {"model": ("MODEL",), "min_cfg": ("FLOAT", options)}}

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"
    CATEGORY = "sampling/video_models"

    def patch(self, model: Any, min_cfg: float) -> tuple[Any]:
        """A view of the model with a scale for each frame."""
        view, scales = model.clone(), self.scales
        view.set_model_sampler_cfg_function(
            lambda args: guided_by_frame(args, scales(args, min_cfg))
        )
        return (view,)


class VideoTriangleCFGGuidance(VideoLinearCFGGuidance):
    """Weaker guidance for the first and the last frames, which show the given view again.

    Source: Voleti et al. 2024, https://arxiv.org/abs/2403.12008, section 3.
    """

    scales = staticmethod(triangle_scales)


def share(default: float) -> tuple[str, dict[str, float]]:
    """Declaration of a part of a length."""
    return "FLOAT", {"default": default, "min": 0, "max": 1.0, "step": 0.01}


class ConditioningSetAreaPercentageVideo:
    """Restricts a conditioning to a part of the picture and of the time."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        sizes = {name: share(1.0) for name in ("width", "height", "temporal")}
        offsets = {name: share(0) for name in ("x", "y", "z")}
        strength = {"default": 1.0, "min": 0.0, "max": 10.0, "step": 0.01}
        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                **sizes,
                **offsets,
                "strength": ("FLOAT", strength),
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
        temporal: float,
        x: float,
        y: float,
        z: float,
        strength: float,
    ) -> tuple[Conditioning]:
        """The conditioning with its area; z and temporal are offset and length in time."""
        values = {
            "area": ("percentage", temporal, height, width, z, y, x),
            "strength": strength,
            "set_area_to_bounds": False,
        }
        return (node_helpers.conditioning_set_values(conditioning, values),)


NODE_CLASS_MAPPINGS = {
    "VideoLinearCFGGuidance": VideoLinearCFGGuidance,
    "VideoTriangleCFGGuidance": VideoTriangleCFGGuidance,
    "ConditioningSetAreaPercentageVideo": ConditioningSetAreaPercentageVideo,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}
