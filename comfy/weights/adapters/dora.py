"""Adding a delta to a weight, plainly or with DoRA's renormalisation of magnitudes.

Source: Liu et al. 2024, https://arxiv.org/abs/2402.09353.
"""

from __future__ import annotations

import torch

from comfy.weights.adapters.base import AdapterError, DeltaFunction


def add_delta(
    weight: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    strength: float,
    dora_scale: torch.Tensor | None,
    function: DeltaFunction,
    dtype: torch.dtype,
) -> torch.Tensor:
    """weight + strength * scale * delta, or its DoRA form when a magnitude vector is given.

    Args:
        weight: Changed in place.
        delta: In the weight's shape; not modified.
        scale: alpha over rank.
        strength: Multiplier of the change.
        dora_scale: Learned magnitudes, per output row or per input column, or None.
        function: Applied to what is added.
        dtype: Type of the arithmetic.
    """
    if dora_scale is not None:
        return renormalise(weight, delta, scale, strength, dora_scale, function, dtype)
    change = delta * (strength * scale)
    return weight.add_(function(change).to(weight.dtype))


def renormalise(
    weight: torch.Tensor,
    delta: torch.Tensor,
    scale: float,
    strength: float,
    dora_scale: torch.Tensor,
    function: DeltaFunction,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The DoRA weight: direction weight + scale * delta, magnitude `dora_scale`, in place.

    The norm is taken over each output row of the plain weight when `dora_scale` has the weight's
    first size, else over each input column of the changed weight. A strength other than 1
    interpolates between the old weight and the full result.

    Raises:
        AdapterError: The magnitudes fit neither axis.
    """
    magnitude = dora_scale.to(device=weight.device, dtype=dtype)
    change = function(delta * scale)
    changed = weight + change.to(weight.dtype)
    rows = magnitude.shape[0] == weight.shape[0]
    base = weight if rows else changed
    flat = base.reshape(base.shape[0], -1) if rows else base.transpose(0, 1).flatten(start_dim=1)
    norm = flat.norm(dim=1)
    if rows:
        norm = norm.reshape(-1, *(1,) * (weight.ndim - 1))
    else:
        norm = norm.reshape(1, -1, *(1,) * (weight.ndim - 2))
    norm = norm + torch.finfo(weight.dtype).eps
    try:
        result = changed * (magnitude / norm).to(weight.dtype)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise AdapterError(
            f"DoRA magnitudes {tuple(magnitude.shape)} do not fit weight {tuple(weight.shape)}"
        ) from error
    if strength != 1.0:
        result = weight + (result - weight) * strength
    return weight.copy_(result)


def rescale_rows(
    weight: torch.Tensor,
    delta: torch.Tensor,
    strength: float,
    magnitude: torch.Tensor,
    function: DeltaFunction,
) -> torch.Tensor:
    """The DoRA weight m * (W + delta) / |W + delta|, norms over all but the first axis, in place.

    This is the form that PEFT trains. A strength other than 1 interpolates as in `renormalise`.

    Args:
        weight: Changed in place.
        delta: Already scaled by alpha over rank.
        strength: Multiplier of the change.
        magnitude: Length of every row of the result, in the row order of `delta`.
        function: Reorders rows of delta and magnitudes.
    Raises:
        AdapterError: There are more or fewer magnitudes than rows.
    """
    if magnitude.numel() != weight.shape[0]:
        raise AdapterError(
            f"DoRA magnitudes {tuple(magnitude.shape)} do not fit weight {tuple(weight.shape)}"
        )
    column = magnitude.to(delta).reshape(-1, *(1,) * (weight.ndim - 1))
    changed = weight.to(delta.dtype) + function(delta)
    length = torch.linalg.vector_norm(changed.flatten(start_dim=1), dim=1).reshape(column.shape)
    result = changed * (function(column) / (length + torch.finfo(delta.dtype).eps))
    if strength != 1.0:
        result = weight + (result - weight) * strength
    return weight.copy_(result)
