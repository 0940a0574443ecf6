"""Nodes for pictures as conditioning: image encoders, unCLIP, and objects in boxes (GLIGEN)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import folder_paths
from comfy import clip_vision
from comfy.devices import placement
from comfy.ldm.gligen.model import build_gligen
from comfy.patching.patcher import ModelPatcher
from comfy.sampling.options import is_gligen
from comfy.weights.contents import contents_in_words
from comfy.weights.errors import WeightFileError
from comfy.weights.state_dict import load_torch_file
from comfy_nodes.limits import MAX_RESOLUTION

Conditioning = list[list[Any]]
PIXELS_PER_CELL = 8


class CLIPVisionLoader:
    """Loads an image encoder."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"clip_name": (folder_paths.get_filename_list("clip_vision"),)}}

    RETURN_TYPES = ("CLIP_VISION",)
    FUNCTION = "load_clip"
    CATEGORY = "loaders"

    def load_clip(self, clip_name: str) -> tuple[Any]:
        """The encoder of a file in models/clip_vision."""
        return (clip_vision.load(folder_paths.get_full_path_or_raise("clip_vision", clip_name)),)


class CLIPVisionEncode:
    """Describes a picture by the states of an image encoder."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "clip_vision": ("CLIP_VISION",),
                "image": ("IMAGE",),
                "crop": (["center", "none"],),
            }
        }

    RETURN_TYPES = ("CLIP_VISION_OUTPUT",)
    FUNCTION = "encode"
    CATEGORY = "conditioning"

    def encode(self, clip_vision: Any, image: Tensor, crop: str) -> tuple[Any]:
        """The states; crop "center" takes the middle square, "none" stretches."""
        return (clip_vision.encode_image(image, crop=crop == "center"),)


class unCLIPConditioning:
    """Adds a picture to a conditioning, for unCLIP models."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                "clip_vision_output": ("CLIP_VISION_OUTPUT",),
                "strength": ("FLOAT", {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.01}),
                "noise_augmentation": (
                    "FLOAT",
                    {"default": 0.0, "min": 0.0, "max": 1.0, "step": 0.01},
                ),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "apply_adm"
    CATEGORY = "conditioning"

    def apply_adm(
        self,
        conditioning: Conditioning,
        clip_vision_output: Any,
        strength: float,
        noise_augmentation: float,
    ) -> tuple[Conditioning]:
        """The conditioning with one more picture."""
        if strength == 0:
            return (conditioning,)
        picture = {
            "clip_vision_output": clip_vision_output,
            "strength": strength,
            "noise_augmentation": noise_augmentation,
        }
        name = "unclip_conditioning"
        added = [
            [cond, {**options, name: [*options.get(name, ()), picture]}]
            for cond, options in conditioning
        ]
        return (added,)


class GLIGENLoader:
    """Loads a GLIGEN network."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"gligen_name": (folder_paths.get_filename_list("gligen"),)}}

    RETURN_TYPES = ("GLIGEN",)
    FUNCTION = "load_gligen"
    CATEGORY = "loaders"

    def load_gligen(self, gligen_name: str) -> tuple[Any]:
        """The network of a file in models/gligen, in a patcher."""
        path = folder_paths.get_full_path_or_raise("gligen", gligen_name)
        weights = load_torch_file(path)
        try:
            network = build_gligen(weights)
        except (ValueError, KeyError, RuntimeError) as error:
            raise WeightFileError(
                path,
                f"no GLIGEN model: it holds {contents_in_words(list(weights))} ({error})",
                "choose a file of GLIGEN for Stable Diffusion",
            ) from error
        load, offload = placement.get_torch_device(), placement.unet_offload_device()
        return (ModelPatcher(network, load_device=load, offload_device=offload),)


def _pixels(default: int, least: int) -> tuple[str, dict[str, int]]:
    return ("INT", {"default": default, "min": least, "max": MAX_RESOLUTION, "step": 8})


class GLIGENTextBoxApply:
    """Asks for an object, named by a text, in a box."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "conditioning_to": ("CONDITIONING",),
                "clip": ("CLIP",),
                "gligen_textbox_model": ("GLIGEN",),
                "text": ("STRING", {"multiline": True, "dynamicPrompts": True}),
                "width": _pixels(64, 8),
                "height": _pixels(64, 8),
                "x": _pixels(0, 0),
                "y": _pixels(0, 0),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "append"
    CATEGORY = "conditioning/gligen"

    def append(
        self,
        conditioning_to: Conditioning,
        clip: Any,
        gligen_textbox_model: Any,
        text: str,
        width: int,
        height: int,
        x: int,
        y: int,
    ) -> tuple[Conditioning]:
        """The conditioning with one more box; sizes in pixels.

        Raises:
            TypeError: There is no GLIGEN network, or what stands in its place is none.
        """
        if not hasattr(gligen_textbox_model, "model"):
            found = "none" if gligen_textbox_model is None else type(gligen_textbox_model).__name__
            raise TypeError(
                f"gligen_textbox_model: expected a GLIGEN network, found {found}; load one with "
                "GLIGENLoader"
            )
        _, pooled = clip.encode_from_tokens(clip.tokenize(text), return_pooled="unprojected")
        cells = [size // PIXELS_PER_CELL for size in (height, width, y, x)]
        box = (pooled, *cells)
        added = []
        for cond, options in conditioning_to:
            earlier = options.get("gligen")
            if earlier is not None and not is_gligen(earlier):
                raise TypeError(
                    "conditioning_to: expected one whose option 'gligen' is (kind, network, boxes),"
                    f" found {str(earlier)[:100]!r}; a node before this one put it there"
                )
            boxes = ("position", gligen_textbox_model, [*(earlier[2] if earlier else ()), box])
            added.append([cond, {**options, "gligen": boxes}])
        return (added,)


NODE_CLASS_MAPPINGS = {
    "CLIPVisionEncode": CLIPVisionEncode,
    "CLIPVisionLoader": CLIPVisionLoader,
    "GLIGENLoader": GLIGENLoader,
    "GLIGENTextBoxApply": GLIGENTextBoxApply,
    "unCLIPConditioning": unCLIPConditioning,
}

NODE_DISPLAY_NAME_MAPPINGS = {
    "CLIPVisionEncode": "CLIP Vision Encode",
    "CLIPVisionLoader": "Load CLIP Vision",
}
