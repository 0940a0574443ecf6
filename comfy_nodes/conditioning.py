"""Nodes that make and combine conditioning: what the picture should show."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from comfy import progress
from comfy.text_encoders.weighting import INTERPRETATION_TEXT, INTERPRETATIONS
from comfy_nodes.conditioning_areas import (
    ConditioningSetArea,
    ConditioningSetAreaPercentage,
    ConditioningSetAreaStrength,
    ConditioningSetMask,
    ConditioningSetTimestepRange,
)

logger = logging.getLogger(__name__)

Conditioning = list[list[Any]]
OWN_INTERPRETATION = "from clip"


def interpretation_input() -> tuple[list[str], dict[str, Any]]:
    """Declaration of what weights in a text do, which few people change."""
    tooltip = (
        "What weights such as (word:1.2) do. from clip: what was set for the text encoder; "
        f"{INTERPRETATION_TEXT}"
    )
    choices = [OWN_INTERPRETATION, *INTERPRETATIONS]
    return choices, {"default": OWN_INTERPRETATION, "advanced": True, "tooltip": tooltip}


class CLIPTextEncode:
    """Text to conditioning."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        text = {
            "multiline": True,
            "dynamicPrompts": True,
            "tooltip": "What the picture should show. (word:1.2) gives a word more weight.",
        }
        return {
            "required": {
                "text": ("STRING", text),
                "clip": ("CLIP", {"tooltip": "Text encoder that reads the text."}),
            },
            "optional": {"weight_interpretation": interpretation_input()},
        }

    RETURN_TYPES = ("CONDITIONING",)
    OUTPUT_TOOLTIPS = ("The text as the diffusion model understands it.",)
    FUNCTION = "encode"
    CATEGORY = "conditioning"
    DESCRIPTION = "Encodes a text with a CLIP model, to guide the diffusion model."

    def encode(
        self, clip: Any, text: str, weight_interpretation: str = OWN_INTERPRETATION
    ) -> tuple[Conditioning]:
        """Encodes one text.

        Args:
            weight_interpretation: What weights in the text do; `OWN_INTERPRETATION` for what was
                set for the encoder.
        Raises:
            RuntimeError: The CLIP input is empty, as with a checkpoint that holds no text encoder.
        """
        if clip is None:
            raise RuntimeError(
                "the CLIP input is empty: the checkpoint it comes from holds no text encoder; "
                "load one with a Load CLIP node"
            )
        if weight_interpretation != OWN_INTERPRETATION:
            clip = clip.clone()
            clip.weight_interpretation = weight_interpretation
        tokens = clip.tokenize(text)
        return (clip.encode_from_tokens_scheduled(tokens),)


class CLIPSetLastLayer:
    """Stops the text encoder early."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        layer = {"default": -1, "min": -24, "max": -1, "step": 1}
        return {"required": {"clip": ("CLIP",), "stop_at_clip_layer": ("INT", layer)}}

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "set_last_layer"
    CATEGORY = "conditioning"
    DESCRIPTION = (
        "Uses an earlier layer of the text encoder: -1 is the last one, -2 the one before."
    )

    def set_last_layer(self, clip: Any, stop_at_clip_layer: int) -> tuple[Any]:
        """A view of the encoder that stops at the layer, counted from the end."""
        stopped = clip.clone()
        stopped.clip_layer(stop_at_clip_layer)
        return (stopped,)


class ConditioningCombine:
    """Both conditionings side by side: their predictions are averaged."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "conditioning_1": ("CONDITIONING",),
                "conditioning_2": ("CONDITIONING",),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "combine"
    CATEGORY = "conditioning"

    def combine(
        self, conditioning_1: Conditioning, conditioning_2: Conditioning
    ) -> tuple[Conditioning]:
        """The entries of both."""
        return (conditioning_1 + conditioning_2,)


class ConditioningAverage:
    """Mixes two texts into one."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        strength = {"default": 1.0, "min": 0.0, "max": 1.0, "step": 0.01}
        return {
            "required": {
                "conditioning_to": ("CONDITIONING",),
                "conditioning_from": ("CONDITIONING",),
                "conditioning_to_strength": ("FLOAT", strength),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "addWeighted"
    CATEGORY = "conditioning"

    def addWeighted(
        self,
        conditioning_to: Conditioning,
        conditioning_from: Conditioning,
        conditioning_to_strength: float,
    ) -> tuple[Conditioning]:
        """to * strength + from * (1 - strength); a shorter `from` counts as zeros where it ends."""
        other, other_options = only_entry(conditioning_from, "conditioning_from")
        check_widths(conditioning_to, other, other_options)
        other_pooled = other_options.get("pooled_output")
        mixed = []
        for tensor, options in conditioning_to:
            changed = dict(options)
            pooled = options.get("pooled_output", other_pooled)
            if pooled is not None and other_pooled is not None:
                changed["pooled_output"] = _mix(pooled, other_pooled, conditioning_to_strength)
            elif other_pooled is not None:
                changed["pooled_output"] = other_pooled
            fitted = _with_length(other, tensor.shape[1])
            mixed.append([_mix(tensor, fitted, conditioning_to_strength), changed])
        return (mixed,)


class ConditioningConcat:
    """Appends the tokens of one text to another."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "conditioning_to": ("CONDITIONING",),
                "conditioning_from": ("CONDITIONING",),
            }
        }

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "concat"
    CATEGORY = "conditioning"

    def concat(
        self, conditioning_to: Conditioning, conditioning_from: Conditioning
    ) -> tuple[Conditioning]:
        """Each entry of `to` followed by the tokens of the first entry of `from`."""
        other, _ = only_entry(conditioning_from, "conditioning_from")
        check_widths(conditioning_to, other, {})
        joined = [
            [torch.cat(_in_one_batch(tensor, other), 1), dict(o)] for tensor, o in conditioning_to
        ]
        return (joined,)


class ConditioningZeroOut:
    """Replaces text by zeros."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"conditioning": ("CONDITIONING",)}}

    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "zero_out"
    CATEGORY = "advanced/conditioning"

    def zero_out(self, conditioning: Conditioning) -> tuple[Conditioning]:
        """The same entries with context, pooled output and second text context set to zero."""
        zeroed = []
        for tensor, options in conditioning:
            changed = dict(options)
            for name in ("pooled_output", "conditioning_lyrics"):
                if changed.get(name) is not None:
                    changed[name] = torch.zeros_like(changed[name])
            zeroed.append([torch.zeros_like(tensor), changed])
        return (zeroed,)


def only_entry(conditioning: Conditioning, name: str) -> tuple[Tensor, dict[str, Any]]:
    """First entry of a conditioning that a node can use only one of; others are told of.

    Raises:
        ValueError: The conditioning is empty.
    """
    if not conditioning:
        raise ValueError(f"{name} is empty; it must hold at least one entry")
    if len(conditioning) > 1:
        progress.warn(
            logger,
            "%s holds %d texts, and only the first is used; join this node to each of them and "
            "combine what comes out",
            name,
            len(conditioning),
        )
    tensor, options = conditioning[0]
    return tensor, options


def check_widths(conditioning: Conditioning, other: Tensor, other_options: dict[str, Any]) -> None:
    """Refuse to join what two text encoders of different widths, or batches, made.

    Args:
        conditioning: The input `conditioning_to`.
        other: Embeddings [B, L, D] of the input `conditioning_from`.
        other_options: Their options, whose pooled output counts too.
    Raises:
        ValueError: With both sizes.
    """
    for tensor, options in conditioning:
        pooled = options.get("pooled_output"), other_options.get("pooled_output")
        for what, to, found in (("embeddings", tensor, other), ("pooled outputs", *pooled)):
            if to is None or found is None:
                continue
            counts = {to.shape[0], found.shape[0]} - {1}
            if to.shape[-1] != found.shape[-1] or to.ndim != found.ndim or len(counts) > 1:
                raise ValueError(
                    f"conditioning_from: expected {what} of the width and batch of "
                    f"conditioning_to, {tuple(to.shape)}, found {tuple(found.shape)}; encode both "
                    "texts with the text encoders of one model"
                )


def _in_one_batch(first: Tensor, second: Tensor) -> list[Tensor]:
    """Both with as many items as the larger batch; one item serves all."""
    count = max(first.shape[0], second.shape[0])
    return [tensor.expand(count, *tensor.shape[1:]) for tensor in (first, second)]


def _mix(a: Tensor, b: Tensor, weight_of_a: float) -> Tensor:
    return a * weight_of_a + b * (1.0 - weight_of_a)


def _with_length(tensor: Tensor, length: int) -> Tensor:
    """Tokens [B, L, D] cut or padded with zeros to `length`."""
    cut = tensor[:, :length]
    if cut.shape[1] == length:
        return cut
    missing = cut.new_zeros(cut.shape[0], length - cut.shape[1], *cut.shape[2:])
    return torch.cat([cut, missing], dim=1)


NODE_CLASS_MAPPINGS: dict[str, type] = {
    "CLIPTextEncode": CLIPTextEncode,
    "CLIPSetLastLayer": CLIPSetLastLayer,
    "ConditioningAverage": ConditioningAverage,
    "ConditioningCombine": ConditioningCombine,
    "ConditioningConcat": ConditioningConcat,
    "ConditioningSetArea": ConditioningSetArea,
    "ConditioningSetAreaPercentage": ConditioningSetAreaPercentage,
    "ConditioningSetAreaStrength": ConditioningSetAreaStrength,
    "ConditioningSetMask": ConditioningSetMask,
    "ConditioningZeroOut": ConditioningZeroOut,
    "ConditioningSetTimestepRange": ConditioningSetTimestepRange,
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    "CLIPTextEncode": "CLIP Text Encode (Prompt)",
    "CLIPSetLastLayer": "CLIP Set Last Layer",
    "ConditioningAverage": "ConditioningAverage",
    "ConditioningCombine": "Conditioning (Combine)",
    "ConditioningConcat": "Conditioning (Concat)",
    "ConditioningSetArea": "Conditioning (Set Area)",
    "ConditioningSetAreaPercentage": "Conditioning (Set Area with Percentage)",
    "ConditioningSetAreaStrength": "ConditioningSetAreaStrength",
    "ConditioningSetMask": "Conditioning (Set Mask)",
}
