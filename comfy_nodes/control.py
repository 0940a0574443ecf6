"""Nodes that let control networks steer the sampling of a conditioning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

import folder_paths
from comfy.control.loading import load_controlnet

Conditioning = list[list[Any]]


def strength_input() -> tuple[str, dict[str, Any]]:
    """Declaration of a control network's strength."""
    return ("FLOAT", {"default": 1.0, "min": 0.0, "max": 10.0, "step": 0.01})


def percent_input(default: float) -> tuple[str, dict[str, Any]]:
    """Declaration of an end of the part of sampling in which it acts."""
    return ("FLOAT", {"default": default, "min": 0.0, "max": 1.0, "step": 0.001})


class ControlNetLoader:
    """Loads a control network."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"control_net_name": (folder_paths.get_filename_list("controlnet"),)}}

    RETURN_TYPES = ("CONTROL_NET",)
    FUNCTION = "load_controlnet"
    CATEGORY = "loaders"

    def load_controlnet(self, control_net_name: str) -> tuple[Any]:
        """The control network of a file in models/controlnet."""
        path = folder_paths.get_full_path_or_raise("controlnet", control_net_name)
        return (load_controlnet(path),)


class DiffControlNetLoader:
    """Loads a control network stored as differences from a diffusion model."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        names = folder_paths.get_filename_list("controlnet")
        return {"required": {"model": ("MODEL",), "control_net_name": (names,)}}

    RETURN_TYPES = ("CONTROL_NET",)
    FUNCTION = "load_controlnet"
    CATEGORY = "loaders"

    def load_controlnet(self, model: Any, control_net_name: str) -> tuple[Any]:
        """The control network, the model's weights added to its differences."""
        path = folder_paths.get_full_path_or_raise("controlnet", control_net_name)
        return (load_controlnet(path, model),)


class ControlNetApply:
    """Adds a control network to a conditioning; it then acts on the other conditioning too."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                "control_net": ("CONTROL_NET",),
                "image": ("IMAGE",),
                "strength": strength_input(),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "apply_controlnet"
    DEPRECATED = True
    CATEGORY = "conditioning/controlnet"

    def apply_controlnet(
        self, conditioning: Conditioning, control_net: Any, image: Tensor, strength: float
    ) -> tuple[Conditioning]:
        """The conditioning with the control network at the end of its chain."""
        if strength == 0:
            return (conditioning,)
        hint = image.movedim(-1, 1)
        controlled = []
        for cond, options in conditioning:
            control = control_net.copy().set_cond_hint(hint, strength)
            if "control" in options:
                control.set_previous_controlnet(options["control"])
            added = {"control": control, "control_apply_to_uncond": True}
            controlled.append([cond, {**options, **added}])
        return (controlled,)


class ControlNetApplyAdvanced:
    """Adds a control network to both conditionings, for a part of the sampling."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "positive": ("CONDITIONING",),
                "negative": ("CONDITIONING",),
                "control_net": ("CONTROL_NET",),
                "image": ("IMAGE",),
                "strength": strength_input(),
                "start_percent": percent_input(0.0),
                "end_percent": percent_input(1.0),
            },
            "optional": {"vae": ("VAE",)},
        }

    RETURN_TYPES = ("CONDITIONING", "CONDITIONING")
    RETURN_NAMES = ("positive", "negative")
    FUNCTION = "apply_controlnet"
    CATEGORY = "conditioning/controlnet"

    def apply_controlnet(
        self,
        positive: Conditioning,
        negative: Conditioning,
        control_net: Any,
        image: Tensor,
        strength: float,
        start_percent: float,
        end_percent: float,
        vae: Any = None,
        extra_concat: Sequence[Tensor] = (),
    ) -> tuple[Conditioning, Conditioning]:
        """Both conditionings; entries that had the same chain share the new link."""
        if strength == 0:
            return (positive, negative)
        hint = image.movedim(-1, 1)
        links: dict[int, Any] = {}

        def link(before: Any) -> Any:
            if id(before) not in links:
                control = control_net.copy().set_cond_hint(
                    hint, strength, (start_percent, end_percent), vae=vae, extra_concat=extra_concat
                )
                links[id(before)] = control.set_previous_controlnet(before)
            return links[id(before)]

        def controlled(conditioning: Conditioning) -> Conditioning:
            return [
                [
                    cond,
                    {
                        **options,
                        "control": link(options.get("control")),
                        "control_apply_to_uncond": False,
                    },
                ]
                for cond, options in conditioning
            ]

        return (controlled(positive), controlled(negative))


NODE_CLASS_MAPPINGS = {
    "ControlNetApply": ControlNetApply,
    "ControlNetApplyAdvanced": ControlNetApplyAdvanced,
    "ControlNetLoader": ControlNetLoader,
    "DiffControlNetLoader": DiffControlNetLoader,
}

NODE_DISPLAY_NAME_MAPPINGS = {
    "ControlNetApply": "Apply ControlNet (OLD)",
    "ControlNetApplyAdvanced": "Apply ControlNet",
    "ControlNetLoader": "Load ControlNet Model",
    "DiffControlNetLoader": "Load ControlNet Model (diff)",
}
