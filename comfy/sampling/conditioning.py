"""Conditioning before the first step: areas, masks, ranges and network inputs made concrete.

A graph hands over lists of (tensor, options). `convert_cond` turns them into one dict per entry;
the functions here resolve what depends on the run: percentages become latent cells, masks get the
latent's size, start and end percents become sigmas, and the model makes its inputs. Functions
named `resolve_*` and `calculate_*` change the given list in place, as callers of the public names
expect.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from comfy import resize
from comfy.sampling import masks
from comfy.sampling.options import check_options

CondList = list[dict[str, Any]]

# An area made from a mask is at least this many latent cells wide and high.
MIN_BOUNDS = 8


def convert_cond(cond: Sequence[Any]) -> CondList:
    """Entries (tensor or None, options) as dicts with cross_attn, model_conds and a fresh uuid."""
    entries: CondList = []
    for context, options in cond:
        entry = dict(options)
        check_options(entry)
        if context is not None:
            entry["cross_attn"] = context
        entry["model_conds"] = dict(entry.get("model_conds", {}))
        entry["uuid"] = uuid.uuid4()
        entries.append(entry)
    return entries


def _is_number(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        return False


def _resolve_area(area: Sequence[Any], dims: Sequence[int]) -> tuple[int, ...]:
    """An area in latent cells: sizes, then offsets, one of each per spatial axis.

    An area of fewer axes than the latent (that of a picture, in a video) applies to the last ones
    and takes the others whole. One of more axes keeps its first ones, whatever they were meant for:
    pictures depend on it.

    Raises:
        ValueError: It is no area, or begins before the latent does.
    """
    is_share = len(area) > 0 and area[0] == "percentage"
    numbers = area[1:] if is_share else area
    axes = len(numbers) // 2
    whole = all(_is_number(number) and (is_share or number == int(number)) for number in numbers)
    if (
        axes == 0
        or len(numbers) != 2 * axes
        or not whole
        or any(offset < 0 for offset in numbers[axes:])
    ):
        raise ValueError(
            f"an area is (height, width, y, x) in latent cells, or ('percentage', ...) and shares "
            f"of the latent, none before its start; found {tuple(area)}"
        )
    if not is_share:
        numbers = [int(number) for number in numbers]
    sizes, offsets = list(numbers[:axes]), list(numbers[axes:])
    missing = max(len(dims) - axes, 0)
    sizes, offsets = sizes[: len(dims)], offsets[: len(dims)]
    if is_share:
        shared = dims[missing:]
        sizes = [max(1, round(size * dim)) for size, dim in zip(sizes, shared)]
        offsets = [round(offset * dim) for offset, dim in zip(offsets, shared)]
    return (*dims[:missing], *sizes, *(0,) * missing, *offsets)


def _mask_bounds(mask: Tensor) -> tuple[int, int, int, int]:
    """Area (height, width, y, x) around the non-zero cells of masks [B, ..., H, W]."""
    union = mask.abs().flatten(0, -3).amax(dim=0, keepdim=True)
    boxes, is_empty = masks.get_mask_aabb(union)
    if is_empty[0]:  # something has to be sampled: a corner of the least size
        return MIN_BOUNDS, MIN_BOUNDS, 0, 0
    left, top, right, bottom = boxes[0].tolist()
    height, width = max(MIN_BOUNDS, bottom - top + 1), max(MIN_BOUNDS, right - left + 1)
    return height, width, top, left


def _resolve_mask(mask: Tensor, dims: Sequence[int], device: Any) -> Tensor:
    """A conditioning mask [B, *dims] on the device.

    Raises:
        ValueError: It has no rows and columns.
    """
    masks.check_is_mask(mask, dims)
    mask = mask.to(device=device)
    if mask.ndim == len(dims):
        mask = mask.unsqueeze(0)
    if mask.ndim == len(dims) + 2 and mask.shape[1] == 1:  # with an axis for channels, as a latent
        mask = mask.squeeze(1)
    if tuple(mask.shape[1:]) == tuple(dims):
        return mask
    if len(dims) == 1:  # rows of a picture joined to one line
        line = mask.reshape(mask.shape[0], 1, -1)
        return torch.nn.functional.interpolate(line, size=tuple(dims), mode="linear").squeeze(1)
    if len(dims) == 3:  # masks of frames, or one mask for all frames
        frames = mask.reshape(-1, 1, *(mask.shape[-3:] if mask.ndim > 2 else (1, *mask.shape)))
        return torch.nn.functional.interpolate(frames, size=tuple(dims), mode="trilinear")[:, 0]
    if mask.ndim < 4:
        mask = resize.common_upscale(mask.unsqueeze(1), dims[-1], dims[-2], "bilinear", "none")
        return mask.squeeze(1)
    return resize.common_upscale(mask, dims[-1], dims[-2], "bilinear", "none")


def resolve_areas_and_cond_masks_multidim(
    conditions: CondList, dims: Sequence[int], device: Any
) -> None:
    """Make areas and masks of all entries concrete for a latent with spatial axes `dims`."""
    for index, entry in enumerate(conditions):
        if "area" not in entry and "mask" not in entry:
            continue
        changed = dict(entry)
        if changed.get("area") is not None:
            changed["area"] = _resolve_area(changed["area"], dims)
        elif "area" in changed:
            del changed["area"]
        if changed.get("mask") is not None:
            mask = _resolve_mask(changed["mask"], dims, device)
            if changed.get("set_area_to_bounds", False) and len(dims) > 1:
                changed["area"] = _resolve_area(_mask_bounds(mask), dims)
            changed["mask"] = mask
        conditions[index] = changed


def resolve_areas_and_cond_masks(conditions: CondList, h: int, w: int, device: Any) -> None:
    """`resolve_areas_and_cond_masks_multidim` for a latent of h rows and w columns."""
    resolve_areas_and_cond_masks_multidim(conditions, [h, w], device)


def calculate_start_end_timesteps(model: Any, conds: CondList) -> None:
    """Turn start and end percents into the sigmas `timestep_start` and `timestep_end`."""
    to_sigma = model.model_sampling.percent_to_sigma
    for index, entry in enumerate(conds):
        limits = {}
        # A clip-scheduled entry has its own percents, which lie inside those of the node.
        for percent, limit in (
            ("start_percent", "timestep_start"),
            ("end_percent", "timestep_end"),
        ):
            if entry.get(f"clip_{percent}") is not None:
                limits[limit] = to_sigma(entry[f"clip_{percent}"])
            if entry.get(percent) is not None:
                limits[limit] = _narrower(limit, to_sigma(entry[percent]), limits.get(limit))
        if limits:
            conds[index] = {**entry, **limits}


def _narrower(limit: str, sigma: float, other: float | None) -> float:
    if other is None:
        return sigma
    return min(sigma, other) if limit == "timestep_start" else max(sigma, other)


def pre_run_control(model: Any, conds: CondList) -> None:
    """Let control nets prepare for the run."""
    to_sigma = model.model_sampling.percent_to_sigma
    for entry in conds:
        if "control" in entry:
            entry["control"].pre_run(model, to_sigma)


def _area_contains(outer: Sequence[int], inner: Sequence[int]) -> bool:
    axes = len(inner) // 2
    return len(outer) == len(inner) and all(
        outer[axis + axes] <= inner[axis + axes]
        and outer[axis] + outer[axis + axes] >= inner[axis] + inner[axis + axes]
        for axis in range(axes)
    )


def create_cond_with_same_area_if_none(conds: CondList, c: dict[str, Any]) -> None:
    """Give the opposite list an entry for the area of c, so that guidance has both sides there.

    Its inputs are copied from the smallest entry of the list that covers the area; an entry without
    area covers everything and is used when no other does.
    """
    area = c.get("area")
    if area is None:
        return
    source: dict[str, Any] | None = None
    for entry in conds:
        other = entry.get("area")
        if other is None:
            source = entry if source is None else source
        elif _area_contains(other, area):
            known = None if source is None else source.get("area")
            if known is None or _cells(known) > _cells(other):
                source = entry
    if source is None or source.get("area") == area:
        return
    conds.append({**c, "model_conds": dict(source["model_conds"])})


def _cells(area: Sequence[int]) -> int:
    cells = 1
    for size in area[: len(area) // 2]:
        cells *= size
    return cells


def apply_empty_x_to_equal_area(
    conds: CondList, uncond: CondList, name: str, uncond_fill_func: Callable[[list[Any], int], Any]
) -> None:
    """Share an option of entries without area with the opposite list's entries without it."""
    values = [entry[name] for entry in conds if "area" not in entry and entry.get(name) is not None]
    plain = [(index, entry) for index, entry in enumerate(uncond) if "area" not in entry]
    targets = [(index, entry) for index, entry in plain if entry.get(name) is None]
    if not targets or len(targets) < len(plain):  # the other list has its own: leave it alone
        return
    for place in range(len(values)):
        index, entry = targets[place % len(targets)]
        uncond[index] = {**entry, name: uncond_fill_func(values, place)}


def encode_model_conds(
    model_function: Callable[..., dict[str, Any]],
    conds: CondList,
    noise: Tensor,
    device: Any,
    prompt_type: str,
    **kwargs: Any,
) -> CondList:
    """Let the model make its inputs from the options of every entry.

    Args:
        model_function: A base model's `extra_conds`.
        conds: Entries; the list is changed in place and returned.
        noise: Start noise [B, C, ...].
        prompt_type: "positive", "negative" or another list's name.
        **kwargs: Further facts of the run; options of the entry take precedence.
    """
    for index, entry in enumerate(conds):
        params = dict(entry)
        params["device"], params["noise"] = device, noise
        # Pixels of a picture whose size the entry does not say: eight to a latent cell.
        width = noise.shape[3] * 8 if noise.ndim >= 4 else None
        params["width"] = params.get("width", width)
        params["height"] = params.get("height", noise.shape[2] * 8)
        params["prompt_type"] = params.get("prompt_type", prompt_type)
        for name, value in kwargs.items():
            params.setdefault(name, value)
        made = model_function(**params)
        conds[index] = {**entry, "model_conds": {**entry["model_conds"], **made}}
    return conds


def process_conds(
    model: Any,
    noise: Tensor,
    conds: dict[str, CondList],
    device: Any,
    latent_image: Tensor | None = None,
    denoise_mask: Tensor | None = None,
    seed: int | None = None,
    latent_shapes: Sequence[Sequence[int]] | None = None,
) -> dict[str, CondList]:
    """Prepare every list of a guider for sampling; the lists are changed in place.

    Returns:
        The same dict.
    Raises:
        ValueError: An entry of a nested latent has an area or a mask: which member is it for?
    """
    if latent_shapes is not None and len(latent_shapes) > 1:
        _refuse_areas(conds)
    for name in conds:
        resolve_areas_and_cond_masks_multidim(conds[name], noise.shape[2:], device)
    for name in conds:
        calculate_start_end_timesteps(model, conds[name])
    if hasattr(model, "extra_conds"):
        facts = {"latent_image": latent_image, "denoise_mask": denoise_mask, "seed": seed}
        for name in conds:
            conds[name] = encode_model_conds(
                model.extra_conds, conds[name], noise, device, name,
                **facts, latent_shapes=latent_shapes,
            )  # fmt: skip
    _complete_areas(conds)
    for entries in conds.values():
        for entry in entries:
            if entry.get("hooks") is not None:
                for hook in entry["hooks"].hooks:
                    hook.initialize_timesteps(model)
    for entries in conds.values():
        pre_run_control(model, entries)
    _share_with_other_lists(conds)
    return conds


def _refuse_areas(conds: dict[str, CondList]) -> None:
    for name, entries in conds.items():
        for entry in entries:
            for option in ("area", "mask"):
                if entry.get(option) is not None:
                    raise ValueError(
                        f"the {name} conditioning has the option {option!r}, which cannot apply to "
                        "a latent of several parts (video with sound); leave it out"
                    )


def _complete_areas(conds: dict[str, CondList]) -> None:
    """Give each area of one list its counterpart in all the others."""
    for name in conds:
        for entry in list(conds[name]):
            for other in conds:
                if other != name:
                    create_cond_with_same_area_if_none(conds[other], entry)


def _share_with_other_lists(conds: dict[str, CondList]) -> None:
    """Control nets that ask for it, and GLIGEN boxes, also apply to the other lists."""
    positive = conds.get("positive")
    if positive is None:
        return
    with_control = [entry for entry in positive if entry.get("control_apply_to_uncond", False)]
    for name in conds:
        if name != "positive":
            apply_empty_x_to_equal_area(
                with_control, conds[name], "control", lambda values, place: values[place]
            )
            apply_empty_x_to_equal_area(
                positive, conds[name], "gligen", lambda values, place: values[place]
            )
