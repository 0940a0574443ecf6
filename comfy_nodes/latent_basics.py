"""What the nodes for latents share."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comfy.devices import memory
from comfy_nodes.limits import MAX_RESOLUTION

Latent = dict[str, Any]
CELL = 8  # pixels per latent cell and axis
KINDS = {3: "sound", 4: "picture", 5: "video"}  # what latents with so many axes are of
PLANE, VIDEO = (4, 5), (5,)


def pixels_input(default: int, least: int, step: int = CELL) -> tuple[str, dict[str, int]]:
    """Declaration of a size or position in pixels."""
    return ("INT", {"default": default, "min": least, "max": MAX_RESOLUTION, "step": step})


def replaced(latent: Latent, samples: Tensor) -> Latent:
    """The latent dict with other samples; all further entries stay."""
    return {**latent, "samples": samples}


def batch_indices(latent: Latent, first: int = 0) -> list[int]:
    """Index of each item in the batch its noise is drawn for.

    Args:
        first: Index of the first item of a latent that brings none.

    Raises:
        ValueError: They are no whole numbers in a row.
    """
    count = latent["samples"].shape[0]
    given = latent.get("batch_index")
    if given is None or (isinstance(given, Sized) and not len(given)):
        return list(range(first, first + count))
    indices = np.asarray(given)
    if indices.ndim != 1 or not np.issubdtype(indices.dtype, np.integer):
        raise ValueError(
            f"batch_index: expected whole numbers from 0 on, one for each of the {count} latents "
            f"of the batch, found {str(given)[:100]!r}; a node before this one put it there"
        )
    return [int(index) for index in indices]


def noise_mask_of(latent: Latent, id: str) -> Tensor | None:
    """The noise mask of a latent, [1 or B, 1, ...] with the axes of the samples; None without one.

    On a video masks without an axis of time are those of its moments, the same for every item.

    Args:
        id: Name of the input that the latent came through.

    Raises:
        ValueError: It is no mask.
    """
    mask = latent.get("noise_mask")
    if mask is None or getattr(mask, "is_nested", False):
        return mask
    if not torch.is_tensor(mask) or mask.ndim < 2 or 0 in mask.shape:
        found = tuple(mask.shape) if torch.is_tensor(mask) else type(mask).__name__
        raise ValueError(
            f"{id}: expected a latent whose noise_mask is [batch, height, width], found {found}; "
            "give it one with Set Latent Noise Mask"
        )
    mask = mask if mask.is_floating_point() else mask.float()
    if latent["samples"].ndim == 5 and mask.ndim < 5:
        return mask.reshape(1, 1, -1, *mask.shape[-2:])
    if latent["samples"].ndim == 4 and mask.ndim != 4:
        return mask.reshape(-1, 1, *mask.shape[-2:])
    return mask


def empty_samples(shape: Sequence[int], device: torch.device | str) -> Tensor:
    """Zeros of a shape.

    Raises:
        NotEnoughMemory: There is no room for them.
    """
    memory.require_room(shape, "an empty latent", device)
    return torch.zeros(tuple(shape), device=device)


def samples_of(latent: Latent, id: str, axes: tuple[int, ...] = PLANE) -> Tensor:
    """The samples of a latent that has one of some numbers of axes.

    Args:
        id: Name of the input that the latent came through.

    Raises:
        ValueError: It is a latent of something else.
    """
    samples: Tensor = latent["samples"]
    if samples.is_nested:
        raise ValueError(
            f"{id}: expected the latent of one kind, found those of several together (video and "
            "sound); take them apart first (LTXVSeparateAVLatent)"
        )
    if samples.ndim not in axes:
        wanted = " or ".join(KINDS[count] for count in axes)
        raise ValueError(
            f"{id}: expected a latent of a {wanted}, found one of a "
            f"{KINDS.get(samples.ndim, 'different kind')} (shape {tuple(samples.shape)})"
        )
    return samples


def check_alike(wanted: Sequence[int], samples: Tensor, id: str) -> None:
    """Refuse a latent that cannot be brought to another's shape by resizing.

    Args:
        wanted: Shape of the other one.
        samples: The latent; one channel serves for all.
        id: Name of the input that it came through.

    Raises:
        ValueError: Channels or axes differ, or the lengths of sounds or videos.
    """
    channels = samples.shape[1] == wanted[1] or 1 in (samples.shape[1], wanted[1])
    resizable = samples.ndim >= 4 or tuple(samples.shape[2:]) == tuple(wanted[2:])
    if samples.ndim != len(wanted) or not channels or not resizable:
        raise ValueError(
            f"{id}: expected a latent like the other one, of shape {tuple(wanted)}, found "
            f"{tuple(samples.shape)}; latents of different models do not go together"
        )
    if samples.ndim == 5 and samples.shape[2] not in (1, wanted[2]):
        raise ValueError(
            f"{id}: expected a latent of a video of {wanted[2]} cells in time, found one of "
            f"{samples.shape[2]}; make both as long"
        )


def check_beside(first: Tensor, second: Tensor, axis: int, id: str) -> None:
    """Refuse to join latents that differ along another axis than the one they are joined along.

    Raises:
        ValueError: They differ there.
    """

    def others(latent: Tensor) -> list[int]:
        place = axis % latent.ndim
        return [size for number, size in enumerate(latent.shape) if number != place]

    if first.ndim != second.ndim or others(first) != others(second):
        raise ValueError(
            f"{id}: expected a latent that differs from the other one, {tuple(first.shape)}, along "
            f"axis {axis} only, found {tuple(second.shape)}"
        )
