"""What a context window sees of a conditioning entry: its part of tensors, mask, area and hints.

Masks and areas are resolved before (see ``conditioning``): in cells of the whole latent.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comfy import resize

CHANNELS = 1  # axis that every window needs whole
PICTURE_AXES = 4  # of latents of pictures; what has fewer axes beside them is text
BATCH, TIME = 0, 2
FRAME_COUNT = "num_video_frames"  # input of networks whose batch is one video


def frame_axis(tensor: Tensor, x_in: Tensor, dim: int, known: int | None = None) -> int | None:
    """Axis along which a network input has a frame for each of the latent's; None without one.

    Args:
        dim: Axis of the latent x_in that is divided. An input of one axis more holds several, one
            beside another, after the batch.
        known: The axis of the input's frames, where the input tells.
    """
    if known is not None:
        return known if dim == TIME and tensor.size(known) == x_in.size(dim) else None
    if tensor.ndim < min(x_in.ndim, PICTURE_AXES) and dim > CHANNELS:
        return None  # a text may have as many tokens or channels by chance
    axis = dim + (tensor.ndim > x_in.ndim and dim > BATCH)
    return axis if tensor.ndim > axis and tensor.size(axis) == x_in.size(dim) else None


def mask_of(mask: Tensor, x_in: Tensor, window: Any) -> Tensor:
    """The window's part of a mask, which has the latent's axes but its channels."""
    axis = max(window.dim - 1, BATCH)
    if mask.size(axis) != x_in.size(window.dim):
        return mask
    return window.get_tensor(mask, x_in.device, axis)


def areas_of(area: Sequence[int], window: Any) -> list[tuple[int, ...]]:
    """Where an area lies in the window: a part for each run of its cells side by side."""
    if window.dim <= CHANNELS:
        return [tuple(area)]
    axis, axes = window.dim - CHANNELS - 1, len(area) // 2
    start = area[axes + axis]
    is_inside = [start <= frame < start + area[axis] for frame in window.index_list]
    parts, place = [], 0
    for inside, run in itertools.groupby(is_inside):
        length = len(list(run))
        if inside:
            part = list(area)
            part[axis], part[axes + axis] = length, place
            parts.append(tuple(part))
        place += length
    return parts


def control_of(control: Any, x_in: Tensor, window: Any) -> Any:
    """A control net, and those before it, with hints of the window alone.

    What belongs to the run is shared with the given one; where nothing is to be cut it is returned.
    Entries with one control net get one copy for the window, so that they may share a call.
    """
    known: dict[int, Any] = window.controls
    if id(control) not in known:
        known[id(control)] = _control_of(control, x_in, window)
    return known[id(control)]


def _control_of(control: Any, x_in: Tensor, window: Any) -> Any:
    previous = getattr(control, "previous_controlnet", None)
    before = control_of(previous, x_in, window) if previous is not None else None
    hint = getattr(control, "cond_hint_original", None)
    part = _hint_of(control, hint, x_in, window) if torch.is_tensor(hint) else hint
    if part is hint and before is previous:
        return control
    changed = copy.copy(control)
    changed.previous_controlnet = before
    if part is not hint:
        changed.cond_hint_original, changed.cond_hint = part, None
        changed.control_input = None  # features of the whole hint, of those that keep them
        extra = getattr(control, "extra_concat_orig", ())
        changed.extra_concat_orig = [_hint_of(control, one, x_in, window) for one in extra]
    return changed


def _hint_of(control: Any, hint: Tensor, x_in: Tensor, window: Any) -> Tensor:
    """The window's part of a hint: pictures of the batch, or rows or columns of each picture."""
    if window.dim == BATCH:
        return window.get_tensor(hint) if hint.size(BATCH) == x_in.size(BATCH) else hint
    if x_in.ndim != PICTURE_AXES or hint.ndim != PICTURE_AXES:
        return hint
    cell = control.compression_ratio
    if control.vae is not None:
        cell *= control.vae.spacial_compression_encode()
    height, width = (size * cell for size in x_in.shape[-2:])
    whole = resize.common_upscale(hint, width, height, control.upscale_algorithm, "center")
    places = [frame * cell + pixel for frame in window.index_list for pixel in range(cell)]
    part: tuple[Any, ...] = (*(slice(None),) * window.dim, places)
    return whole[part]
