"""Nodes that let a picture steer as if it were text."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import folder_paths
from comfy.style_model import load_style_model

Conditioning = list[list[Any]]


class StyleModelLoader:
    """Loads a style model."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"style_model_name": (folder_paths.get_filename_list("style_models"),)}}

    RETURN_TYPES = ("STYLE_MODEL",)
    FUNCTION = "load_style_model"
    CATEGORY = "loaders"

    def load_style_model(self, style_model_name: str) -> tuple[Any]:
        """The style model of a file in models/style_models."""
        path = folder_paths.get_full_path_or_raise("style_models", style_model_name)
        return (load_style_model(path),)


class StyleModelApply:
    """Puts the tokens of a picture after those of the text."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        strength = {"default": 1.0, "min": 0.0, "max": 10.0, "step": 0.001}
        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                "style_model": ("STYLE_MODEL",),
                "clip_vision_output": ("CLIP_VISION_OUTPUT",),
                "strength": ("FLOAT", strength),
                "strength_type": (["multiply", "attn_bias"],),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "apply_stylemodel"
    CATEGORY = "conditioning/style_model"

    def apply_stylemodel(
        self,
        conditioning: Conditioning,
        style_model: Any,
        clip_vision_output: Any,
        strength: float,
        strength_type: str,
    ) -> tuple[Conditioning]:
        """The conditioning with more tokens.

        Args:
            strength: Factor of the tokens ("multiply"), or of the attention they get
                ("attn_bias").
        Raises:
            ValueError: The tokens are for another kind of model, or a mask does not fit the text.
        """
        tokens = style_model.get_cond(clip_vision_output).flatten(0, 1).unsqueeze(0)
        attention = 1.0
        if strength_type == "multiply":
            tokens = tokens * strength
        else:
            attention = strength
        styled = []
        for text, options in conditioning:
            if text.shape[-1] != tokens.shape[-1]:
                raise ValueError(
                    f"conditioning: expected texts of width {tokens.shape[-1]}, as this style "
                    f"model's tokens have, found {tuple(text.shape)}; the two belong to different "
                    "kinds of model"
                )
            changed = dict(options)
            if attention != 1.0 or "attention_mask" in options:
                mask = options.get("attention_mask")
                size = options.get("attention_mask_img_shape") or (1, 1)
                changed["attention_mask"] = extended_mask(
                    mask, text, tokens.shape[1], math.prod(size), attention
                )
                changed["attention_mask_img_shape"] = size
            joined = torch.cat([text, tokens.to(text).expand(text.shape[0], -1, -1)], dim=1)
            styled.append([joined, changed])
        return (styled,)


def extended_mask(
    mask: Tensor | None, text: Tensor, added: int, picture: int, attention: float
) -> Tensor:
    """An attention bias with room for tokens after the text.

    Args:
        mask: The bias [B, text + picture, text + picture] there was (a boolean one allows where
            it is true); None allows everything.
        text: Tokens [B, L, D].
        added: Number of new tokens.
        picture: Number of picture tokens that the mask describes.
        attention: Factor of the attention that text and picture pay to the new tokens.

    Raises:
        ValueError: The mask describes other numbers of tokens.
    """
    batch, length = text.shape[:2]
    before = length + picture
    if mask is None:
        mask = torch.zeros(batch, before, before)
    elif not torch.is_tensor(mask) or mask.shape[-2:] != (before, before):
        found = tuple(mask.shape) if torch.is_tensor(mask) else type(mask).__name__
        raise ValueError(
            f"conditioning: expected an attention_mask of {before} rows and columns, {length} for "
            f"the text and {picture} for the picture, found {found}; a node before this one made it"
        )
    elif mask.dtype == torch.bool:
        mask = torch.log(mask.float())  # true: 0, false: minus infinity
    places = [*range(length), *range(length + added, before + added)]
    old = torch.tensor(places)
    new = torch.arange(length, length + added)
    bias = torch.zeros(batch, before + added, before + added, dtype=torch.float16)
    bias[:, old[:, None], old[None, :]] = mask.to(bias)
    bias[:, old[:, None], new[None, :]] = math.log(attention) if attention > 0 else -math.inf
    return bias.to(text.device)


NODE_CLASS_MAPPINGS = {
    "StyleModelLoader": StyleModelLoader,
    "StyleModelApply": StyleModelApply,
}

NODE_DISPLAY_NAME_MAPPINGS = {
    "StyleModelLoader": "Load Style Model",
    "StyleModelApply": "Apply Style Model",
}
