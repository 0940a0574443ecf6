"""What the nodes for pictures [B, H, W, C] and masks [B, H, W] share."""

from __future__ import annotations

from torch import Tensor

COLOURS = 3


def colours_of(image: Tensor) -> Tensor:
    """Red, green and blue [..., 3] of pictures [..., C]; grey ones have the same value in all."""
    if image.shape[-1] < COLOURS:  # grey, with or without transparency
        return image[..., :1].expand(*image.shape[:-1], COLOURS)
    return image[..., :COLOURS]


def masks_of(mask: Tensor) -> Tensor:
    """Masks [B, H, W], whatever axes they came with: [H, W] or [B, 1, H, W], say."""
    return mask.reshape(-1, *mask.shape[-2:])


def check_count(found: int, wanted: int, what: str, id: str, of: str) -> None:
    """Refuse a batch that can neither be used whole for each of another's items nor one by one.

    Args:
        found: Items of the batch.
        wanted: Items of the other one.
        what: What an item is.
        id: Name of the input that the batch came through.
        of: Name of the other one's input.

    Raises:
        ValueError: It has neither one item nor as many as the other.
    """
    if found not in (1, wanted):
        raise ValueError(
            f"{id}: expected one {what} or as many as {of} has ({wanted}), found {found}; repeat "
            "or cut one of them to the other's number"
        )


def scaled_sides(columns: int, rows: int, factor: float, id: str) -> tuple[int, int]:
    """Width and height times a factor, rounded.

    Args:
        id: Name of the input that the factor came through.

    Raises:
        ValueError: Nothing would be left of a side.
    """
    width, height = round(columns * factor), round(rows * factor)
    if min(width, height) < 1:
        raise ValueError(
            f"{id}: expected at least 1 on each side, found {width} x {height}, which is "
            f"{columns} x {rows} scaled by {factor:g}; ask for a larger size or give a larger one"
        )
    return width, height
