"""Encoding and decoding in tiles, for pictures that do not fit in one piece.

Pictures are worked three times, in square, wide and tall tiles, and averaged: seams of one run lie
inside tiles of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from comfy.progress import ProgressBar
from comfy.tiling import get_tiled_scale_steps, tiled_scale, tiled_scale_multidim

Apply = Callable[[Tensor], Tensor]


def three_tilings(
    x: Tensor,
    function: Apply,
    tile_x: int,
    tile_y: int,
    overlap: int,
    scale: float,
    out_channels: int,
    output_device: Any,
) -> Tensor:
    """Mean of the results in tiles of three shapes; ``x [B, C, H, W]``."""
    shapes = [(tile_x // 2, tile_y * 2), (tile_x * 2, tile_y // 2), (tile_x, tile_y)]
    steps = sum(
        get_tiled_scale_steps(x.shape[3], x.shape[2], width, height, overlap)
        for width, height in shapes
    )
    bar = ProgressBar(x.shape[0] * steps)
    total: Tensor | None = None
    for width, height in shapes:
        result = tiled_scale(
            x,
            function,
            width,
            height,
            overlap,
            upscale_amount=scale,
            out_channels=out_channels,
            output_device=output_device,
            pbar=bar,
        )
        total = result if total is None else total.add_(result)
    assert total is not None
    return total.div_(3.0)


def tiles_1d(
    x: Tensor,
    function: Apply,
    tile: int,
    overlap: int,
    scale: float,
    out_channels: int,
    output_device: Any,
    downscale: bool = False,
) -> Tensor:
    """Sound ``[B, C, L]``, piece by piece."""
    return tiled_scale_multidim(
        x,
        function,
        tile=(tile,),
        overlap=overlap,
        upscale_amount=scale,
        out_channels=out_channels,
        output_device=output_device,
        downscale=downscale,
    )


def tiles_3d(
    x: Tensor,
    function: Apply,
    tile: Sequence[int],
    overlap: Sequence[int],
    ratio: Any,
    index_formulas: Any,
    out_channels: int,
    output_device: Any,
    downscale: bool = False,
) -> Tensor:
    """Video ``[B, C, T, H, W]``, in tiles of (frames, height, width)."""
    return tiled_scale_multidim(
        x,
        function,
        tile=tile,
        overlap=overlap,
        upscale_amount=ratio,
        index_formulas=index_formulas,
        out_channels=out_channels,
        output_device=output_device,
        downscale=downscale,
    )
