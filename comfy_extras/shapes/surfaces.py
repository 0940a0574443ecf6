"""Triangles around the part of a grid whose values lie above a threshold.

Grid axes are z, y, x. Vertices are x, y, z; the grid's longest side runs from -1 to 1 and the
others are as long in proportion, from -1 on. Triangles run counterclockwise as seen from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

Surface = tuple[Tensor, Tensor]  # vertices [N, 3] as coordinates, triangles [M, 3] as indices
CORNERS = ((0, 0), (1, 0), (1, 1), (0, 1))  # of a square, counterclockwise


def padded(values: Tensor, threshold: float) -> Tensor:
    """Values [D, H, W] with a layer around them that lies outside."""
    outside = 0.0 if threshold >= 0 else threshold - 1.0
    return functional.pad(values.float(), (1,) * 6, value=outside)


def other_axes(axis: int) -> tuple[int, int]:
    """Two axes from the first to the second of which one turns counterclockwise about `axis`."""
    return (axis + 2) % 3, (axis + 1) % 3


def crossings(inside: Tensor) -> Iterator[tuple[int, bool, Tensor]]:
    """Where the surface lies between neighbours of a padded grid.

    Returns:
        Axis, whether the outside follows the inside along it, and the places [n, 3] of the first
        of both.
    """
    for axis in range(3):
        count = inside.shape[axis] - 1
        here, there = inside.narrow(axis, 0, count), inside.narrow(axis, 1, count)
        yield axis, True, (here & ~there).nonzero()
        yield axis, False, (there & ~here).nonzero()


def squares(places: Tensor, axis: int, ascending: bool) -> Tensor:
    """The corners [n, 4, 3] of squares that lie across an axis, from that place's first corner."""
    first, second = other_axes(axis)
    offsets = torch.zeros(4, 3, dtype=torch.long, device=places.device)
    for corner, (along_first, along_second) in enumerate(CORNERS):
        offsets[corner, first], offsets[corner, second] = along_first, along_second
    return places[:, None] + (offsets if ascending else offsets.flip(0))


def numbered(corners: Tensor, shape: torch.Size) -> Tensor:
    """The numbers of grid places [..., 3] in a grid's memory."""
    _, rows, columns = shape
    return (corners[..., 0] * rows + corners[..., 1]) * columns + corners[..., 2]


def triangles(quads: Tensor) -> Tensor:
    """Squares [n, 4] as triangles [2 n, 3]."""
    return torch.cat([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]])


def blocks(values: Tensor, threshold: float) -> Surface:
    """The faces of the cubes that are inside."""
    inside = padded(values, threshold) > threshold
    quads = []
    for axis, ascending, places in crossings(inside):
        # A cube at padded place p reaches from p - 1 to p; this face is that at the axis' p.
        first = places - 1
        first[:, axis] += 1
        quads.append(numbered(squares(first, axis, ascending), inside.shape))
    used, indices = torch.unique(torch.cat(quads), return_inverse=True)
    _, rows, columns = inside.shape
    places = torch.stack([used // (rows * columns), used // columns % rows, used % columns], dim=1)
    return places.float(), triangles(indices)


def surface_net(values: Tensor, threshold: float) -> Surface:
    """A smoother surface: a vertex in each cell of eight neighbours that it passes, in the middle
    of where it crosses the cell's edges.

    Source: Gibson 1998, https://doi.org/10.1007/BFb0056277, without relaxation.
    """
    grid = padded(values, threshold)
    inside = grid > threshold
    counts = sum(
        inside[tuple(slice(o, o + n - 1) for o, n in zip(corner, inside.shape))].to(torch.uint8)
        for corner in product((0, 1), repeat=3)
    )
    assert isinstance(counts, Tensor)
    cells = ((counts > 0) & (counts < 8)).nonzero()
    number = torch.full(counts.shape, -1, device=cells.device)
    number[cells.unbind(1)] = torch.arange(cells.shape[0], device=cells.device)
    quads = []
    for axis, ascending, places in crossings(inside):
        first = places - 1
        first[:, axis] += 1
        corners = squares(first, axis, ascending)
        quads.append(number[corners.unbind(-1)])
    # A value stands in the middle of its cube, and the padding comes before the first.
    middles = cells.float() + mean_crossings(grid, inside, cells, threshold) - 0.5
    return middles, triangles(torch.cat(quads))


def mean_crossings(grid: Tensor, inside: Tensor, cells: Tensor, threshold: float) -> Tensor:
    """The mean place within each cell [n, 3] at which the surface crosses its edges."""
    total = torch.zeros(cells.shape[0], 3, device=cells.device)
    count = torch.zeros(cells.shape[0], 1, device=cells.device)
    for axis in range(3):
        for corner in product((0, 1), repeat=3):
            if corner[axis]:
                continue
            begin = torch.tensor(corner, device=cells.device)
            step = torch.zeros_like(begin)
            step[axis] = 1
            here, there = ((cells + place).unbind(1) for place in (begin, begin + step))
            crossed = (inside[here] != inside[there])[:, None]
            share = (threshold - grid[here]) / (grid[there] - grid[here])
            place = begin + step * share[:, None]
            total += torch.where(crossed, place, 0.0)
            count += crossed
    return total / count


ALGORITHMS: dict[str, Callable[[Tensor, float], Surface]] = {
    "surface net": surface_net,
    "basic": blocks,
}


def surface(values: Tensor, threshold: float, algorithm: str) -> Surface:
    """The surface of values [D, H, W], at the size that models are made in.

    Raises:
        ValueError: No value lies above the threshold.
    """
    if not bool((values > threshold).any()):
        lowest, highest = (float(end) for end in (values.min(), values.max()))
        raise ValueError(
            f"threshold: expected less than the greatest value of the voxels, which go from "
            f"{lowest:.3g} to {highest:.3g}, found {threshold}"
        )
    places, faces = ALGORITHMS[algorithm](values, threshold)
    half = max(values.shape) / 2
    return ((places - half) / half).flip(1).contiguous(), faces


def stacked(surfaces: list[Surface]) -> Surface:
    """Surfaces [B, N, 3] and [B, M, 3]; those with less repeat a vertex, in triangles of none."""
    vertices = max(one.shape[0] for one, _ in surfaces)
    faces = max(one.shape[0] for _, one in surfaces)

    def filled(rows: Tensor, count: int, last: Tensor) -> Tensor:
        return torch.cat([rows, last.expand(count - rows.shape[0], 3)])

    return (
        torch.stack([filled(one, vertices, one[-1:]) for one, _ in surfaces]),
        torch.stack([filled(one, faces, torch.zeros_like(one[-1:])) for _, one in surfaces]),
    )
