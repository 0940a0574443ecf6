"""What of a LoRA file does not fit a model, and how that is said."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.nn import Parameter

from comfy import progress
from comfy.weights.adapters import WeightAdapterBase
from comfy.weights.contents import EXAMPLES, contents_in_words, in_words, likely_kind
from comfy.weights.errors import NoMatchingWeightsError, NotANumberError
from comfy.weights.lora_formats.families import is_of_encoder, made_for

logger = logging.getLogger(__name__)

LoraFile = Mapping[str, torch.Tensor]


def warn_unread(unread: Collection[str], lora: LoraFile, name: str = "", model: str = "") -> None:
    """Say how much of a file fits no weight, and for what the file seems to be made.

    Args:
        unread: Keys from which nothing was read.
        lora: The file.
        name: Of the file.
        model: Family of the model it was meant for.
    """
    if not unread:
        return
    family = made_for(lora)
    hint = f"; the file seems to be made for {family}" if family and family != model else ""
    progress.warn(
        logger, "%s%d of %d LoRA tensors fit no weight%s, such as %s%s",
        f"{name}: " if name else "", len(unread), len(lora),
        f" of this model ({model})" if model else "", ", ".join(list(unread)[:EXAMPLES]), hint,
    )  # fmt: skip


def of_wanted(keys: Collection[str], network: bool, encoder: bool) -> list[str]:
    """The keys that speak of what a LoRA is put on: the network, the text encoder, or both."""
    return [key for key in keys if (encoder if is_of_encoder(key) else network)]


def nothing_fits(
    lora: LoraFile, path: str | os.PathLike[str], model: str = "", why: str = ""
) -> NoMatchingWeightsError:
    """The error for a file of which nothing can be applied.

    Args:
        lora: The file.
        path: Its path.
        model: Family of the model it was meant for.
        why: What does not fit; its names if not given.
    """
    family, kind = made_for(lora), likely_kind(lora)
    if family is None or kind is None or kind[1] != "loras":
        found = f"it holds {contents_in_words(list(lora))}"
    else:
        found = f"it holds {in_words(list(lora))} and seems to be made for {family}"
    what = f"this model ({model})" if model else "this model"
    return NoMatchingWeightsError(
        path,
        f"{why or 'none of its tensors fits'} {what}: {found}",
        f"choose a LoRA made for {model or 'the family of this model'}",
    )


def misfits(patches: Mapping[Any, Any], weights: Mapping[str, torch.Tensor]) -> list[Any]:
    """The targets of patches that have another size than the weights they are for.

    Only what is sure is listed: weights that custom nodes pack in a type of their own are left
    out, and so are changes that grow a weight or do not tell their size.
    """
    found = []
    for target, patch in patches.items():
        key, offset = (target, None) if isinstance(target, str) else target[:2]
        weight = weights.get(key)
        if weight is None or type(weight) not in (torch.Tensor, Parameter):
            continue
        if weight.is_floating_point() and not _fits(patch, weight, offset):
            found.append(target)
    return found


def leave_out(wrong: Collection[Any], patches: dict[Any, Any], lora: LoraFile, name: str) -> None:
    """Take patches of another size than their weights away, and say so once for all.

    Args:
        wrong: Their targets.
        patches: Changed in place.
        lora: The file.
        name: Of the file.
    """
    if not wrong:
        return
    first, family = next(iter(wrong)), made_for(lora)
    progress.warn(
        logger, "%s: %d of %d changes have other sizes than the weights and are left out, such as "
        "that of %s%s", name, len(wrong), len(patches),
        first if isinstance(first, str) else first[0],
        f"; the file seems to be made for {family}" if family else "",
    )  # fmt: skip
    for target in wrong:
        del patches[target]


def _fits(patch: Any, weight: torch.Tensor, offset: Any) -> bool:
    shape = list(weight.shape)
    if offset is not None:
        axis, start, length = offset
        if axis >= len(shape) or abs(start) + (length if start >= 0 else 0) > shape[axis]:
            return False
        shape[axis] = length
    elements = torch.Size(shape).numel()
    if isinstance(patch, WeightAdapterBase):
        extent = patch.extent()
        return extent is None or extent[1] is None or extent[1] == elements
    if patch[0] == "diff" and len(patch[1]) == 1:
        return list(patch[1][0].shape) == shape
    return True


def of_numbers(
    lora: dict[str, torch.Tensor], path: str | os.PathLike[str]
) -> dict[str, torch.Tensor]:
    """A LoRA file after a look at every number of it: one NaN makes every picture black.

    Raises:
        NotANumberError: There is one.
    """
    if (likely_kind(lora) or ("", ""))[1] != "loras":
        return lora
    for key, tensor in lora.items():
        if tensor.is_floating_point() and tensor.numel():
            wide = tensor if tensor.element_size() > 1 else tensor.float()
            if wide.sum(dtype=torch.float32).isnan():  # also of inf - inf
                raise NotANumberError(
                    path, f"'{key}' holds numbers that are NaN or infinite, expected finite ones"
                )
    return lora
