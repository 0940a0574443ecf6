"""W' = strength_model * W + strength * change, for every kind of change a patch can record.

A patch is a tuple (strength, value, strength_model, offset, function); patches of a key run in the
order they were added. The change is a difference, a replacement, an adapter, another model's
weight, or a list that holds a weight of another model with its own patches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from comfy import progress
from comfy.devices import casting
from comfy.weights.adapters import ADAPTERS, AdapterError, WeightAdapterBase
from comfy.weights.adapters.base import unchanged
from comfy.weights.adapters.lora import pad_to_shape

logger = logging.getLogger(__name__)

Offset = tuple[int, int, int]
"""(axis, start, length) of the part of a weight that a patch changes; a negative start counts from
the end."""

FAILED_DEVICE = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
"""What a device raises that says nothing about the patch; torch before 2.8 has only the first."""

Patch = tuple[float, Any, float, "Offset | None", "Callable[[torch.Tensor], torch.Tensor] | None"]


def calculate_weight(
    patches: Sequence[Patch],
    weight: torch.Tensor,
    key: str,
    intermediate_dtype: torch.dtype = torch.float32,
    original_weights: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Apply the patches of one key.

    Args:
        patches: In order of application.
        weight: Owned by the caller and changed in place where its shape allows; use the result.
        key: State-dict key, for messages and for `original_weights`.
        intermediate_dtype: Type of the arithmetic.
        original_weights: key -> [(weight, convert)], what "model_as_lora" patches differ from;
            without it they differ from `weight` as it is given.
    Returns:
        The patched weight; larger than `weight` when a patch grows it.
    """
    if original_weights is None and any(is_model_difference(patch) for patch in patches):
        original_weights = {key: [(weight.clone(), None)]}
    for patch in patches:
        strength_model, offset = patch[2], patch[3]
        try:
            part = weight if offset is None else _slice(weight, offset, key)
            if strength_model != 1.0:
                part *= strength_model
            changed = _apply(patch, part, key, intermediate_dtype, original_weights)
        except AdapterError as error:  # the public contract: one bad key leaves the others alone
            progress.warn(logger, "weight left unchanged: %s", error)
            continue
        if changed is None:  # how adapters of custom nodes say that they cannot
            progress.warn(logger, "'%s': %s changed nothing", key, type(patch[1]).__name__)
            continue
        if offset is None:
            weight = changed
        elif changed is not part:
            part.copy_(changed)
    return weight


def _slice(weight: torch.Tensor, offset: Offset, key: str) -> torch.Tensor:
    """The part of a weight that a patch changes.

    Raises:
        AdapterError: The weight has no such part.
    """
    axis, start, length = offset
    size = weight.shape[axis] if -weight.ndim <= axis < weight.ndim else 0
    first = start + size if start < 0 else start
    if first < 0 or length < 0 or first + length > size:
        raise AdapterError(
            f"'{key}': {length} rows from {start} of axis {axis} are not in weight "
            f"{tuple(weight.shape)}; the file was made for another model"
        )
    return weight.narrow(axis, first, length)


def is_model_difference(patch: Sequence[Any]) -> bool:
    """Whether a patch adds the difference between another model's weight and the unpatched one."""
    value = patch[1]
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], str)
        and value[0] == "model_as_lora"
    )


_own = calculate_weight


def is_replaced() -> bool:
    """Whether custom code put another function in the place of `calculate_weight`."""
    return calculate_weight is not _own


def _apply(
    patch: Patch,
    weight: torch.Tensor,
    key: str,
    dtype: torch.dtype,
    original_weights: Mapping[str, Any] | None,
) -> torch.Tensor | None:
    """One patch on one weight (or slice of it); None when the adapter gives none."""
    strength, value, strength_model, offset, function = patch
    function = function or unchanged
    if isinstance(value, list):
        value = (_weight_of_other_model(value, weight, key, dtype),)
    if isinstance(value, WeightAdapterBase):
        return _adapted(value, weight, key, strength, strength_model, offset, function, dtype)
    kind, content = ("diff", value) if len(value) == 1 else (value[0], value[1])
    if kind == "diff":
        return _add_difference(weight, content, key, strength, function)
    if kind == "set":
        return weight.copy_(content[0])
    if kind == "model_as_lora":
        change = _model_difference(weight, content, key, dtype, original_weights, offset)
        return weight.add_(function(change * strength))
    for adapter in ADAPTERS:
        if adapter.name == kind:
            made = adapter(set(), content)
            return _adapted(made, weight, key, strength, strength_model, offset, function, dtype)
    known = ", ".join(["diff", "set", "model_as_lora", *(a.name for a in ADAPTERS)])
    raise AdapterError(f"'{key}': unknown kind of patch {kind!r}; known: {known}")


def _adapted(
    adapter: WeightAdapterBase, weight: torch.Tensor, key: str, *arguments: Any
) -> torch.Tensor | None:
    """The weight changed by an adapter.

    Raises:
        AdapterError: Also for what torch says about tensors that do not go together.
    """
    try:
        return adapter.calculate_weight(weight, key, *arguments)
    except (*FAILED_DEVICE, AdapterError):
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        raise AdapterError(f"'{key}': {type(adapter).__name__} does not fit: {error}") from error


def _weight_of_other_model(
    value: list[Any], weight: torch.Tensor, key: str, dtype: torch.dtype
) -> torch.Tensor:
    """Another model's weight with that model's own patches: [(weight, convert), patch...]."""
    source, convert = value[0]
    stored_type = None if source.element_size() == 1 else dtype  # codes are decoded as they are
    moved = casting.cast_to_device(source, weight.device, stored_type, copy=True)
    own = convert(moved, inplace=True).to(dtype)
    return calculate_weight(value[1:], own, key, intermediate_dtype=dtype)


def _add_difference(
    weight: torch.Tensor, content: Any, key: str, strength: float, function: Any
) -> torch.Tensor:
    difference = content[0]
    padded = len(content) > 1 and bool(content[1].get("pad_weight", False))
    if padded and difference.shape != weight.shape:
        weight = pad_to_shape(weight, tuple(difference.shape))
    if strength == 0.0:
        return weight
    if difference.shape != weight.shape:
        raise AdapterError(
            f"'{key}': difference of {tuple(difference.shape)} does not fit weight "
            f"{tuple(weight.shape)}; the file was made for another model"
        )
    difference = casting.cast_to_device(difference, weight.device, weight.dtype)
    return weight.add_(function(difference * strength))


def _model_difference(
    weight: torch.Tensor,
    content: Any,
    key: str,
    dtype: torch.dtype,
    original_weights: Mapping[str, Any] | None,
    offset: Offset | None,
) -> torch.Tensor:
    """Another model's weight minus the unpatched one, in the weight's type.

    Args:
        weight: The running weight, or the slice of it that is changed.
        content: (other model's weight or that slice of it, optionally what decodes it).
    """
    if original_weights is None or key not in original_weights:
        raise AdapterError(f"'{key}': the unpatched weight is needed and was not given")
    decode = content[1] if len(content) > 1 else None
    sides = []
    for stored, convert in ((content[0], decode), original_weights[key][0][:2]):
        side = casting.cast_to_device(stored, weight.device, None if convert else dtype)
        if convert is not None:
            side = convert(side.clone(), inplace=True).to(dtype)
        if offset is not None and side.shape != weight.shape:
            side = side.narrow(*offset)
        sides.append(side)
    target, original = sides
    if not target.shape == original.shape == weight.shape:
        raise AdapterError(
            f"'{key}': another model's weight of {tuple(target.shape)} does not fit weight "
            f"{tuple(weight.shape)}; it is of another family"
        )
    return (target - original).to(weight.dtype)
