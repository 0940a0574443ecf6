"""Which frames a long latent is divided into, and how overlapping results are weighted.

A schedule maps a number of frames to windows: lists of frame indices. Uniform schedules move and
spread their windows from step to step, so that seams do not stay in one place.
Source: the schedules of AnimateDiff's community implementations; there is no paper for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Windows = list[list[int]]

SMALLEST_WEIGHT = 1e-30  # next to nothing, and far from where single precision ends
SMALLEST_BIAS = 1e-2


class ContextSchedules:
    """Names of schedules."""

    UNIFORM_LOOPED = "looped_uniform"
    UNIFORM_STANDARD = "standard_uniform"
    STATIC_STANDARD = "standard_static"
    BATCHED = "batched"


class ContextFuseMethods:
    """Names of weightings."""

    FLAT = "flat"
    PYRAMID = "pyramid"
    RELATIVE = "relative"
    OVERLAP_LINEAR = "overlap-linear"

    LIST = (PYRAMID, FLAT, OVERLAP_LINEAR)
    LIST_STATIC = (PYRAMID, RELATIVE, FLAT, OVERLAP_LINEAR)


def static_windows(num_frames: int, handler: Any, model_options: dict[str, Any]) -> Windows:
    """Windows at equal distances; the last one is moved back so that it ends with the frames."""
    del model_options
    length = handler.context_length
    if num_frames <= length:
        return [list(range(num_frames))]
    windows = []
    for start in range(0, num_frames, max(length - handler.context_overlap, 1)):
        if start + length >= num_frames:
            windows.append(list(range(num_frames - length, num_frames)))
            break
        windows.append(list(range(start, start + length)))
    return windows


def batched_windows(num_frames: int, handler: Any, model_options: dict[str, Any]) -> Windows:
    """Windows side by side."""
    del model_options
    length = handler.context_length
    return [
        list(range(start, min(start + length, num_frames)))
        for start in range(0, num_frames, length)
    ]


def ordered_halving(step: int) -> float:
    """The bits of a step number mirrored at the point: 0, 1/2, 1/4, 3/4, 1/8, ..."""
    return int(f"{step:064b}"[::-1], 2) / (1 << 64)


def _completed(windows: Windows, num_frames: int, length: int) -> Windows:
    """Windows whose frames all exist, with further ones where a frame was left out.

    Spread windows of few frames go around more than once, and an overlap as long as a window stops
    short of the end.
    """
    windows = [[frame % num_frames for frame in window] for window in windows]
    seen = {frame for window in windows for frame in window}
    while missing := set(range(num_frames)) - seen:
        start = max(min(min(missing), num_frames - length), 0)
        windows.append(list(range(start, min(start + length, num_frames))))
        seen.update(windows[-1])
    return windows


def looped_windows(num_frames: int, handler: Any, model_options: dict[str, Any]) -> Windows:
    """Windows that run over the end into the beginning, shifted from step to step."""
    del model_options
    return _completed(_looped(num_frames, handler), num_frames, handler.context_length)


def _looped(num_frames: int, handler: Any) -> Windows:
    length, overlap = handler.context_length, handler.context_overlap
    if num_frames < length:
        return [list(range(num_frames))]
    strides = min(handler.context_stride, math.ceil(math.log2(num_frames / length)) + 1)
    shift = ordered_halving(handler._step)
    windows = []
    for spread in (1 << power for power in range(strides)):
        offset = round(num_frames * shift)
        first = int(shift * spread) + offset
        last = num_frames + offset + (0 if handler.closed_loop else -overlap)
        for start in range(first, last, max(length * spread - overlap, 1)):
            frames = range(start, start + length * spread, spread)
            windows.append([frame % num_frames for frame in frames])
    return windows


def uniform_windows(num_frames: int, handler: Any, model_options: dict[str, Any]) -> Windows:
    """Looped windows, with those that run over the end moved back or started anew."""
    del model_options
    length = handler.context_length
    if num_frames <= length:
        return [list(range(num_frames))]
    windows = _looped(num_frames, handler)
    place = 0
    while place < len(windows):
        wrap = _first_wrapped(windows[place])
        if wrap is not None:
            start = windows[place][wrap]
            windows[place] = _moved_to_end(windows[place], num_frames)
            if start not in windows[(place + 1) % len(windows)]:
                start = min(start, num_frames - length)
                windows.insert(place + 1, list(range(start, start + length)))
        if windows[place] in windows[:place]:
            del windows[place]
        else:
            place += 1
    return _completed(windows, num_frames, length)


def _first_wrapped(window: Sequence[int]) -> int | None:
    """Place of the first frame that is before the frame before it."""
    for place in range(1, len(window)):
        if window[place] < window[place - 1]:
            return place
    return None


def _moved_to_end(window: Sequence[int], num_frames: int) -> list[int]:
    """A window that ran over the end, moved back by as much."""
    wrap = _first_wrapped(window)
    if wrap is None:
        return list(window)
    unrolled = [*window[:wrap], *(frame + num_frames for frame in window[wrap:])]
    over = unrolled[-1] - (num_frames - 1)
    return [frame - over for frame in unrolled]


def flat_weights(length: int, **facts: Any) -> list[float]:
    """Every frame of a window counts the same."""
    del facts
    return [1.0] * length


def pyramid_weights(length: int, **facts: Any) -> list[float]:
    """Frames count more the farther they are from the window's ends."""
    del facts
    return [float(min(place + 1, length - place)) for place in range(length)]


def overlap_weights(length: int, **facts: Any) -> list[float]:
    """Full weight, faded over the overlap at ends that have a neighbour.

    Args:
        **facts: `full_length` frames in all, `idxs` of the window, `context_overlap`.
    """
    weights = torch.ones(length)
    overlap = min(facts["context_overlap"], length)
    if overlap and min(facts["idxs"]) > 0:
        weights[:overlap] = torch.linspace(SMALLEST_WEIGHT, 1, overlap)
    if overlap and max(facts["idxs"]) < facts["full_length"] - 1:
        weights[-overlap:] = torch.linspace(1, SMALLEST_WEIGHT, overlap)
    return weights.tolist()


def relative_bias(place: int, first: int, last: int) -> float:
    """Weight of a frame by its distance from the middle of its window."""
    half = (last - first + SMALLEST_BIAS) / 2
    return max(SMALLEST_BIAS, 1 - abs(place - (first + last) / 2) / half)


@dataclass
class ContextSchedule:
    """A schedule: func(num_frames, handler, model_options) -> windows."""

    name: str
    func: Callable[[int, Any, dict[str, Any]], Windows]


@dataclass
class ContextFuseMethod:
    """A weighting: func(length, **facts) -> weights; None for the relative one."""

    name: str
    func: Callable[..., list[float]] | None


CONTEXT_MAPPING: dict[str, Callable[[int, Any, dict[str, Any]], Windows]] = {
    ContextSchedules.UNIFORM_LOOPED: looped_windows,
    ContextSchedules.UNIFORM_STANDARD: uniform_windows,
    ContextSchedules.STATIC_STANDARD: static_windows,
    ContextSchedules.BATCHED: batched_windows,
}

FUSE_MAPPING: dict[str, Callable[..., list[float]] | None] = {
    ContextFuseMethods.FLAT: flat_weights,
    ContextFuseMethods.PYRAMID: pyramid_weights,
    ContextFuseMethods.RELATIVE: None,
    ContextFuseMethods.OVERLAP_LINEAR: overlap_weights,
}


def get_matching_context_schedule(context_schedule: str) -> ContextSchedule:
    """The schedule of a name.

    Raises:
        ValueError: no schedule has the name.
    """
    if context_schedule not in CONTEXT_MAPPING:
        known = ", ".join(CONTEXT_MAPPING)
        raise ValueError(f"unknown context schedule {context_schedule!r}; known: {known}")
    return ContextSchedule(context_schedule, CONTEXT_MAPPING[context_schedule])


def get_matching_fuse_method(fuse_method: str) -> ContextFuseMethod:
    """The weighting of a name.

    Raises:
        ValueError: no weighting has the name.
    """
    if fuse_method not in FUSE_MAPPING:
        known = ", ".join(FUSE_MAPPING)
        raise ValueError(f"unknown fuse method {fuse_method!r}; known: {known}")
    return ContextFuseMethod(fuse_method, FUSE_MAPPING[fuse_method])


def match_weights_to_dim(weights: Sequence[float], like: Tensor, dim: int) -> Tensor:
    """Weights shaped to broadcast along one axis of a tensor."""
    shape = [1] * like.ndim
    shape[dim] = len(weights)
    return torch.tensor(weights, dtype=like.dtype, device=like.device).reshape(shape)
