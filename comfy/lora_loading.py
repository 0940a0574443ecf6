"""From a LoRA file to changed views of a model and a text encoder."""

from __future__ import annotations

import logging
import os
from typing import Any

from torch import Tensor

from comfy import progress
from comfy.families.family import ModelFamily
from comfy.ops.encoded import decoded_weights
from comfy.patching.patcher import ModelPatcher
from comfy.text_encoders.clip import CLIP
from comfy.weights import contents, lora_report
from comfy.weights.adapters import IA3Adapter
from comfy.weights.lora import (
    convert_lora,
    model_lora_keys_clip,
    model_lora_keys_unet,
    read_patches,
    require_match,
)

logger = logging.getLogger(__name__)

StateDict = dict[str, Tensor]


def load_lora_for_models(
    model: ModelPatcher | None,
    clip: CLIP | None,
    lora: StateDict,
    strength_model: float,
    strength_clip: float,
    *,
    path: str | None = None,
) -> tuple[ModelPatcher | None, CLIP | None]:
    """Views of a model and a text encoder with a LoRA added.

    Args:
        model, clip: What to change; either may be None and then stays None.
        lora: Tensors of the LoRA file.
        path: The file, for messages.

    Raises:
        NoMatchingWeightsError: Not one tensor of the LoRA fits the model or the text encoder, by
            name and size.
    """
    keys: dict[str, Any] = {}
    weights: dict[str, Tensor] = {}
    if model is not None:
        keys = model_lora_keys_unet(model.model, keys)
        weights.update(decoded_weights(model.model))
    if clip is not None:
        keys = model_lora_keys_clip(clip.cond_stage_model, keys)
        weights.update(decoded_weights(clip.cond_stage_model))
    title, name = _title(model), os.path.basename(path or "the LoRA")
    patches, unread = read_patches(convert_lora(lora), keys)
    require_match(patches, lora, path or "the LoRA", title)
    unread = lora_report.of_wanted(unread, model is not None, clip is not None)
    lora_report.warn_unread(unread, lora, name, title)
    wrong = lora_report.misfits(patches, weights)
    if len(wrong) == len(patches):
        why = f"its names fit, but all {len(wrong)} changes have other sizes than the weights of"
        raise lora_report.nothing_fits(lora, path or "the LoRA", title, why)
    lora_report.leave_out(wrong, patches, lora, name)
    new_model = new_clip = None
    used: set[Any] = set()
    if model is not None:
        new_model = model.clone()
        used.update(new_model.add_patches(patches, strength_model))
    if clip is not None:
        new_clip = clip.clone()
        used.update(new_clip.add_patches(patches, strength_clip))
    # Factors of outputs scale a bias too, where the layer has one.
    unused = [str(k) for k, v in patches.items() if k not in used and not isinstance(v, IA3Adapter)]
    if unused:
        progress.warn(logger, "%s: no place for %s", name, contents.in_words(unused))
    return new_model, new_clip


def _title(model: ModelPatcher | None) -> str:
    """Name of a model's family, where it is one of the table."""
    family = getattr(getattr(model, "model", None), "model_config", None)
    return family.title() if isinstance(family, ModelFamily) else ""
