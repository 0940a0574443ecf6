"""One conditioning entry at one noise level: its cut of the latent, weights and network inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Part of an area's edge over which its weight fades in where it does not touch the latent's border.
FEATHER_CELLS = 8


class Job(NamedTuple):
    """One active conditioning entry at one noise level.

    Attributes:
        input_x: Cut of the noisy latent [B, C, ...].
        mult: Weight of each cell, shaped like input_x.
        conditioning: Network inputs by argument name (classes of ``comfy.conds``).
        area: (sizes..., offsets...) of the cut, or None for the whole latent.
        control: Control net of the entry, or None.
        patches: Network patches that only this entry needs, or None.
        uuid: Identity of the entry.
        hooks: Group of hooks whose weights the entry is evaluated with, or None.
    """

    input_x: Tensor
    mult: Tensor
    conditioning: dict[str, Any]
    area: Sequence[int] | None
    control: Any
    patches: dict[str, list[Any]] | None
    uuid: Any
    hooks: Any


def get_area_and_mult(conds: dict[str, Any], x_in: Tensor, timestep_in: Tensor) -> Job | None:
    """The job of one entry at noise level timestep_in [B]; None where the entry is not active."""
    sigma = float(timestep_in[0]) if "timestep_start" in conds or "timestep_end" in conds else 0.0
    if sigma > conds.get("timestep_start", sigma) or sigma < conds.get("timestep_end", sigma):
        return None
    area, input_x = conds.get("area"), x_in
    if area is not None:
        area = _clamped(area, x_in.shape[2:])
        if min(area[: len(area) // 2]) <= 0:  # wholly outside of the latent
            return None
        input_x = cut(x_in, area)
    mult = _weights(conds, input_x, area, x_in.shape[2:])
    inputs = {
        name: value.process_cond(
            batch_size=x_in.shape[0], device=x_in.device, area=area,
        )
        for name, value in conds["model_conds"].items()
    }  # fmt: skip
    patches = None
    if "gligen" in conds:
        patches = _gligen_patches(conds["gligen"], input_x)
    return Job(
        input_x,
        mult,
        inputs,
        area,
        conds.get("control"),
        patches,
        conds["uuid"],
        conds.get("hooks"),
    )


def _clamped(area: Sequence[int], dims: Sequence[int]) -> list[int]:
    """The part of an area inside the latent."""
    axes = len(dims)
    return [min(area[i], dims[i] - area[i + axes]) for i in range(axes)] + list(area[axes:])


def cut(tensor: Tensor, area: Sequence[int] | None, first_axis: int = 2) -> Tensor:
    """View of the cells of an area; axes before `first_axis` are kept whole."""
    if area is None:
        return tensor
    axes = len(area) // 2
    for axis in range(axes):
        tensor = tensor.narrow(axis + first_axis, area[axis + axes], area[axis])
    return tensor


def _weights(
    conds: dict[str, Any], input_x: Tensor, area: Sequence[int] | None, dims: Sequence[int]
) -> Tensor:
    """Weight map of an entry: its strength, times its mask or faded at the edges of its area."""
    strength = conds.get("strength", 1.0)
    mask = conds.get("mask")
    if mask is not None:
        if tuple(mask.shape[1:]) != tuple(dims):
            raise ValueError(
                f"conditioning mask of shape {tuple(mask.shape)} does not fit a latent of "
                f"{tuple(dims)} cells"
            )
        mask = cut(mask[: input_x.shape[0]], area, first_axis=1)
        mask = mask * (conds.get("mask_strength", 1.0) * strength)
        repeats = (-(-input_x.shape[0] // mask.shape[0]), input_x.shape[1])
        mask = mask.unsqueeze(1).repeat(*repeats, *(1,) * (mask.ndim - 1))
        return mask[: input_x.shape[0]]
    if area is None and strength != 0:
        return input_x.new_full((), strength).expand_as(input_x)
    mult = torch.full_like(input_x, strength)
    if area is not None:
        _feather(mult, area, dims)
    return mult


def _feather(mult: Tensor, area: Sequence[int], dims: Sequence[int]) -> None:
    """Fade an area's weights in linearly from each of its edges inside the latent, in place."""
    axes = len(area) // 2
    for axis in range(axes):
        size, offset = area[axis], area[axis + axes]
        width = min(FEATHER_CELLS, mult.shape[axis + 2] // 4)
        ramp = torch.arange(1, width + 1, device=mult.device, dtype=mult.dtype) / max(width, 1)
        ramp = ramp.reshape(-1, *(1,) * (axes - 1 - axis))
        if offset != 0:
            mult.narrow(axis + 2, 0, width).mul_(ramp)
        if offset + size < dims[axis]:
            mult.narrow(axis + 2, size - width, width).mul_(ramp.flip(0))


def _gligen_patches(gligen: Sequence[Any], input_x: Tensor) -> dict[str, list[Any]]:
    """Position boxes: gligen is (kind, model patcher, boxes); other kinds have no boxes."""
    kind, network, boxes = gligen[0], gligen[1].model, gligen[2]
    shape, device = input_x.shape, input_x.device
    if kind == "position":
        return {"middle_patch": [network.set_position(shape, boxes, device)]}
    return {"middle_patch": [network.set_empty(shape, device)]}


def cond_equal_size(c1: Any, c2: Any) -> bool:
    """Whether two sets of network inputs could be joined."""
    if c1 is c2:
        return True
    return c1.keys() == c2.keys() and all(c1[name].can_concat(c2[name]) for name in c1)


def can_concat_cond(c1: Job, c2: Job) -> bool:
    """Whether two jobs can share a model call."""
    return (
        c1.input_x.shape == c2.input_x.shape
        and c1.control is c2.control
        and c1.patches is c2.patches
        and cond_equal_size(c1.conditioning, c2.conditioning)
    )


def cond_cat(c_list: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the network inputs of several jobs into the arguments of one call."""
    return {
        name: c_list[0][name].concat([inputs[name] for inputs in c_list[1:]]) for name in c_list[0]
    }
