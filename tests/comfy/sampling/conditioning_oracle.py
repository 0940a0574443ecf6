"""What conditioning lists mean, written once more and plainly: one entry at a time, float64, any
number of spatial axes.

Entries are dicts of the graph's options and ``context``; `evaluate` gives each list's estimate as
the mean of its entries' estimates under their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Entry = dict[str, Any]
Lists = dict[str, list[Entry]]
FADE, LEAST_BOUNDS = 8, 8
MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}


def evaluate(
    lists: Lists,
    x: Tensor,
    sigma: float,
    percent_to_sigma: Callable[[float], float],
    predict: Callable[[Entry, Tensor], Tensor],
    only: Sequence[str] = (),
) -> dict[str, Tensor]:
    """The estimate of each list, or of `only` some of them."""
    dims = list(x.shape[2:])
    lists = {name: [resolved(entry, dims) for entry in entries] for name, entries in lists.items()}
    add_opposites(lists)
    out = {}
    for name in only or lists:
        active = [e for e in lists[name] if is_active(e, sigma, percent_to_sigma)]
        jobs = [(e, *weighted(e, x)) for e in active if "default" not in e]
        left = torch.ones_like(x, dtype=torch.float64)
        for _, box, weight in jobs:
            inside(left, box).sub_(weight)
        left.clamp_(min=0.0)
        if (left > 0).any():
            for entry in active:
                if "default" in entry:
                    box, _ = weighted(entry, x)
                    jobs.append((entry, box, inside(left, box)))
        total, weights = torch.zeros_like(left), torch.full_like(left, 1e-37)
        for entry, box, weight in jobs:
            if weight.numel():
                inside(total, box).add_(predict(entry, inside(x.double(), box)) * weight)
                inside(weights, box).add_(weight)
        out[name] = total / weights
    return out


def inside(tensor: Tensor, box: Sequence[tuple[int, int]]) -> Tensor:
    """The cells of a box, one (start, stop) for each spatial axis."""
    return tensor[(..., *(slice(start, max(start, stop)) for start, stop in box))]


def resolved(entry: Entry, dims: list[int]) -> Entry:
    """An entry with its area in cells and its mask in the latent's size."""
    entry, axes = dict(entry), len(dims)
    area = entry.get("area")
    if area is not None and area[0] == "percentage":
        sizes, starts = area[1 : 1 + axes], area[1 + axes :]
        entry["area"] = (
            *(max(1, round(share * dim)) for share, dim in zip(sizes, dims)),
            *(round(share * dim) for share, dim in zip(starts, dims)),
        )
    if entry.get("mask") is not None:
        mask = entry["mask"].reshape(-1, *entry["mask"].shape[-axes:]).unsqueeze(1)
        mask = torch.nn.functional.interpolate(mask, size=dims, mode=MODES[axes])[:, 0]
        entry["mask"] = mask.double()
        if entry.get("set_area_to_bounds"):
            found = mask.abs().amax(0).nonzero()
            low = found.amin(0).tolist() if len(found) else [0] * axes
            high = found.amax(0).tolist() if len(found) else [0] * axes
            sizes = [max(LEAST_BOUNDS, b - a + 1) for a, b in zip(low, high)]
            entry["area"] = (*sizes, *low)
    return entry


def box_of(area: Sequence[int]) -> list[tuple[int, int]]:
    axes = len(area) // 2
    return [(area[axes + i], area[axes + i] + area[i]) for i in range(axes)]


def cells(entry: Entry) -> float:
    """Size of an area; infinite without one."""
    area = entry.get("area")
    if area is None:
        return float("inf")
    size = 1
    for side in area[: len(area) // 2]:
        size *= side
    return size


def add_opposites(lists: Lists) -> None:
    """Each area of a list with the text of the smallest entry around it in the other lists."""
    for name in lists:
        for entry in list(lists[name]):
            if entry.get("area") is None:
                continue
            box = box_of(entry["area"])
            for other in [other for other in lists if other != name]:
                around = [
                    e
                    for e in lists[other]
                    if e.get("area") is None
                    or all(a <= c and d <= b for (a, b), (c, d) in zip(box_of(e["area"]), box))
                ]
                found = min(around, key=cells, default=None)
                if found is not None and found.get("area") != entry["area"]:
                    lists[other].append({**entry, "context": found["context"]})


def is_active(entry: Entry, sigma: float, percent_to_sigma: Callable[[float], float]) -> bool:
    """Whether a noise level lies between all the percents of an entry."""
    starts = [entry[key] for key in ("start_percent", "clip_start_percent") if key in entry]
    ends = [entry[key] for key in ("end_percent", "clip_end_percent") if key in entry]
    return all(sigma <= percent_to_sigma(start) for start in starts) and all(
        sigma >= percent_to_sigma(end) for end in ends
    )


def weighted(entry: Entry, x: Tensor) -> tuple[list[tuple[int, int]], Tensor]:
    """Box of an entry and its weights there [B, C, ...]."""
    batch, channels, *dims = x.shape
    whole = [(0, dim) for dim in dims]
    area = entry.get("area")
    box = whole if area is None else [(a, min(b, d)) for (a, b), d in zip(box_of(area), dims)]
    weight = torch.full((batch, channels, *dims), entry.get("strength", 1.0), dtype=torch.float64)
    if entry.get("mask") is not None:
        mask = entry["mask"][[i % len(entry["mask"]) for i in range(batch)]]
        return box, inside(weight * mask[:, None] * entry.get("mask_strength", 1.0), box)
    for axis, ((start, stop), dim) in enumerate(zip(box, dims), start=2):
        width = min(FADE, (stop - start) // 4)
        for step in range(width):
            if start != 0:
                weight.narrow(axis, start + step, 1).mul_((step + 1) / width)
            if stop < dim:
                weight.narrow(axis, stop - 1 - step, 1).mul_((step + 1) / width)
    return box, inside(weight, box)
