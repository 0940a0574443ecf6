"""Masks at the size of a latent: 1 where something may change, 0 where it stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from comfy import resize

SPATIAL_MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def reshape_mask(input_mask: Tensor, output_shape: Sequence[int]) -> Tensor:
    """Resize a mask to a latent shape; channels and batch are repeated as far as needed.

    Args:
        input_mask: [H, W], [B, H, W], [B, 1, H, W] or already with the latent's axes.
        output_shape: [B, C, L], [B, C, H, W] or [B, C, T, H, W].
    Returns:
        Mask of exactly output_shape.
    Raises:
        ValueError: the latent has another number of axes.
    """
    axes = len(output_shape) - 2
    if axes not in SPATIAL_MODES:
        raise ValueError(f"cannot mask a latent of shape {tuple(output_shape)}: 3 to 5 axes needed")
    check_is_mask(input_mask, output_shape)
    mask = input_mask if input_mask.is_floating_point() else input_mask.float()
    if axes == 2:
        mask = mask.reshape(-1, 1, *mask.shape[-2:])
    elif axes == 1 and mask.ndim != 3:  # [B, L], or rows of a picture joined to one line
        mask = mask.reshape(mask.shape[0], 1, -1)
    elif axes == 3 and mask.ndim < 5:  # a sequence of frames, or one mask for all of them
        mask = mask.reshape(1, 1, -1, *mask.shape[-2:])
    mask = torch.nn.functional.interpolate(
        mask, size=tuple(output_shape[2:]), mode=SPATIAL_MODES[axes]
    )
    if mask.shape[1] < output_shape[1]:
        mask = mask.repeat(1, output_shape[1], *(1,) * axes)[:, : output_shape[1]]
    return resize.repeat_to_batch_size(mask, output_shape[0])


def check_is_mask(mask: Tensor, shape: Sequence[int]) -> None:
    """Refuse what no latent could be masked with.

    Args:
        shape: Of the latent, for the message.
    Raises:
        TypeError: It is no tensor.
        ValueError: There are no axes for rows and columns, or no cells.
    """
    if not torch.is_tensor(mask):
        raise TypeError(
            f"a mask is a tensor [batch, height, width], found {type(mask).__name__}; a node "
            "before this one gave something that is no mask"
        )
    if mask.ndim < 2 or 0 in mask.shape:
        raise ValueError(
            f"a mask of shape {tuple(mask.shape)} has no rows and columns for a latent of shape "
            f"{tuple(shape)}; a mask is [batch, height, width]"
        )


def prepare_mask(noise_mask: Tensor, shape: Sequence[int], device: Any) -> Tensor:
    """The noise mask of a run: resized to the latent and moved to the device."""
    return reshape_mask(noise_mask, shape).to(device)


def get_mask_aabb(masks: Tensor) -> tuple[Tensor, Tensor]:
    """Bounding boxes of the non-zero cells of masks [B, H, W].

    Returns:
        ([B, 4] integer boxes x_min, y_min, x_max, y_max, inclusive; [B] whether a mask is empty).
    """
    batch = masks.shape[0]
    boxes = torch.zeros((batch, 4), device=masks.device, dtype=torch.int)
    is_empty = torch.zeros(batch, device=masks.device, dtype=torch.bool)
    for index, mask in enumerate(masks):
        rows, columns = torch.where(mask)
        if rows.numel() == 0:
            is_empty[index] = True
            continue
        corners = [columns.min(), rows.min(), columns.max(), rows.max()]
        boxes[index] = torch.stack(corners).to(torch.int)
    return boxes, is_empty
