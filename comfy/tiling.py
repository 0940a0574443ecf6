"""Applies a function to overlapping tiles of a tensor and blends the results.

Used where the whole tensor would not fit: autoencoders and upscalers. Every tile is weighted with
ramps over the overlap and the sum is divided by the sum of weights, so seams fade.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Scale = float | Callable[[int], int]  # output size of an input size: a factor, or a function


def get_tiled_scale_steps(width: int, height: int, tile_x: int, tile_y: int, overlap: int) -> int:
    """Number of tiles of a 2-D tensor."""
    rows = 1 if height <= tile_y else math.ceil((height - overlap) / (tile_y - overlap))
    columns = 1 if width <= tile_x else math.ceil((width - overlap) / (tile_x - overlap))
    return rows * columns


def tiled_scale(
    samples: Tensor,
    function: Callable[[Tensor], Tensor],
    tile_x: int = 64,
    tile_y: int = 64,
    overlap: float = 8,
    upscale_amount: float = 4,
    out_channels: int = 3,
    output_device: Any = "cpu",
    pbar: Any = None,
) -> Tensor:
    """Apply a function that enlarges ``[B, C, H, W]`` by ``upscale_amount`` tile by tile."""
    return tiled_scale_multidim(
        samples,
        function,
        (tile_y, tile_x),
        overlap=overlap,
        upscale_amount=upscale_amount,
        out_channels=out_channels,
        output_device=output_device,
        pbar=pbar,
    )


@torch.inference_mode()
def tiled_scale_multidim(
    samples: Tensor,
    function: Callable[[Tensor], Tensor],
    tile: Sequence[int] = (64, 64),
    overlap: float | Sequence[float] = 8,
    upscale_amount: Scale | Sequence[Scale] = 4,
    out_channels: int = 3,
    output_device: Any = "cpu",
    downscale: bool = False,
    index_formulas: Scale | Sequence[Scale] | None = None,
    pbar: Any = None,
) -> Tensor:
    """Apply a function tile by tile.

    Args:
        samples: ``[B, C, *axes]``.
        function: Takes one tile ``[1, C, *tile]`` and gives ``[1, out_channels, *scaled tile]``.
        tile: Size of a tile along each axis, in units of samples.
        overlap: Overlap of neighbouring tiles along each axis, in the same units.
        upscale_amount: How the function changes each axis: a factor, or size -> size.
        downscale: Whether the factors divide instead of multiply.
        index_formulas: Position -> position where that differs from sizes (causal video codecs).
        pbar: Told of each finished tile by ``update(1)``.
    """
    plan = _Plan(samples.shape[2:], tile, overlap, upscale_amount, index_formulas, downscale)
    shape = [out_channels, *plan.scaled_shape()]
    output = torch.empty([samples.shape[0], *shape], device=output_device)
    for number in range(samples.shape[0]):
        sample = samples[number : number + 1]
        if plan.is_single():
            output[number] = function(sample).to(output_device)[0]
            if pbar is not None:
                pbar.update(1)
            continue
        total = torch.zeros([1, *shape], device=output_device)
        weights = torch.zeros([1, 1, *shape[1:]], device=output_device)
        for starts in plan.starts():
            result = function(plan.cut(sample, starts)).to(output_device)
            weight, place = plan.ramps(result), plan.place(result, starts)
            total[place] += result * weight
            weights[place] += weight
            if pbar is not None:
                pbar.update(1)
        output[number] = (total / weights)[0]
    return output


class _Plan:
    """Where tiles start and where their results go."""

    def __init__(
        self,
        shape: Sequence[int],
        tile: Sequence[int],
        overlap: float | Sequence[float],
        scales: Scale | Sequence[Scale],
        positions: Scale | Sequence[Scale] | None,
        downscale: bool,
    ) -> None:
        axes = len(shape)
        self.shape, self.tile = tuple(shape), tuple(tile)
        self.overlap = _per_axis(overlap, axes)
        self.scales = _per_axis(scales, axes)
        self.positions = self.scales if positions is None else _per_axis(positions, axes)
        self.downscale = downscale

    def _apply(self, scale: Scale, value: float) -> float:
        if callable(scale):
            return scale(value)  # type: ignore[arg-type]
        return value / scale if self.downscale else value * scale

    def scaled_shape(self) -> list[int]:
        """Size of the output along each axis."""
        return [round(self._apply(s, size)) for s, size in zip(self.scales, self.shape)]

    def cut(self, sample: Tensor, starts: Sequence[int]) -> Tensor:
        """The tile that starts at ``starts``, a view of the sample."""
        for axis, (start, tile) in enumerate(zip(starts, self.tile), start=2):
            sample = sample.narrow(axis, start, min(tile, sample.shape[axis] - start))
        return sample

    def place(self, result: Tensor, starts: Sequence[int]) -> tuple[slice, ...]:
        """Where in the output the result of a tile belongs."""
        begins = [round(self._apply(p, start)) for p, start in zip(self.positions, starts)]
        sizes = result.shape[2:]
        axes = [slice(begin, begin + size) for begin, size in zip(begins, sizes)]
        return (slice(None), slice(None), *axes)

    def is_single(self) -> bool:
        """Whether one tile holds everything."""
        return all(size <= tile for size, tile in zip(self.shape, self.tile))

    def starts(self) -> itertools.product[tuple[int, ...]]:
        """Start of every tile, the last axis fastest; the last tile along an axis may be small."""
        per_axis = []
        for size, tile, overlap in zip(self.shape, self.tile, self.overlap):
            if size <= tile:
                per_axis.append([0])
                continue
            step = round(tile - overlap)
            if step <= 0:
                raise ValueError(f"tiles of {tile} cannot overlap by {overlap}")
            last = size - overlap
            per_axis.append([int(max(0, min(last, at))) for at in range(0, math.ceil(last), step)])
        return itertools.product(*per_axis)

    def ramps(self, result: Tensor) -> Tensor:
        """Weights ``[1, 1, *axes]`` of one result: rising over the overlap from each side."""
        weight = torch.ones([1, 1, *result.shape[2:]], device=result.device, dtype=result.dtype)
        for axis, overlap in enumerate(self.overlap):
            feather = round(self._apply(self.scales[axis], overlap))
            size = result.shape[axis + 2]
            if feather <= 0 or feather >= size:
                continue
            ramp = torch.ones(size, device=result.device, dtype=result.dtype)
            rise = torch.arange(1, feather + 1, device=result.device, dtype=result.dtype) / feather
            ramp[:feather] *= rise
            ramp[size - feather :] *= rise.flip(0)
            weight = weight * ramp.view([-1 if at == axis + 2 else 1 for at in range(result.ndim)])
        return weight


def _per_axis(value: Any, axes: int) -> list[Any]:
    """One value per axis, from one for all or one each."""
    if isinstance(value, (list, tuple)):
        if len(value) != axes:
            raise ValueError(f"{len(value)} values given for {axes} axes")
        return list(value)
    return [value] * axes
