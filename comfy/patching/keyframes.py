"""Strength of a hook over the sampling schedule: a staircase of keyframes.

Percent runs from 0 (start) to 1 (end); during a run it is compared as a sigma, so a larger value is
an earlier step.
"""

from __future__ import annotations

import math
from typing import Any

import torch

BEFORE_EVERYTHING = 999999999.9
"""Start sigma of a keyframe whose run has not told it yet."""


class HookKeyframe:
    """From `start_percent` on the strength is `strength`, for at least `guarantee_steps` steps."""

    def __init__(
        self, strength: float, start_percent: float = 0.0, guarantee_steps: int = 1
    ) -> None:
        self.strength = strength
        self.start_percent = float(start_percent)
        self.start_t = BEFORE_EVERYTHING
        self.guarantee_steps = guarantee_steps

    def get_effective_guarantee_steps(self, max_sigma: Any) -> int:
        """Guaranteed steps; none when the keyframe lies before the range being sampled."""
        return 0 if self.start_t > max_sigma else self.guarantee_steps

    def clone(self) -> HookKeyframe:
        """A copy that knows the same start sigma."""
        copied = type(self)(self.strength, self.start_percent, self.guarantee_steps)
        copied.start_t = self.start_t
        return copied


class HookKeyframeGroup:
    """Keyframes in order of start, and the one in effect."""

    def __init__(self) -> None:
        self.keyframes: list[HookKeyframe] = []
        self.reset()

    @property
    def strength(self) -> float:
        """Strength in effect; 1 without keyframes."""
        return 1.0 if self._current_keyframe is None else self._current_keyframe.strength

    def reset(self) -> None:
        """Go back to the first keyframe."""
        self._current_keyframe: HookKeyframe | None = None
        self._current_used_steps = 0
        self._current_index = 0
        self._curr_t = -1.0
        self._set_first_as_current()

    def _set_first_as_current(self) -> None:
        self._current_keyframe = self.keyframes[0] if self.keyframes else None

    def add(self, keyframe: HookKeyframe) -> None:
        """Insert a keyframe; those that start together keep their order."""
        self.keyframes.append(keyframe)
        self.keyframes.sort(key=lambda k: k.start_percent)
        self._set_first_as_current()

    def has_index(self, index: int) -> bool:
        """Whether there is a keyframe at an index."""
        return 0 <= index < len(self.keyframes)

    def is_empty(self) -> bool:
        """Whether there are no keyframes."""
        return not self.keyframes

    def clone(self) -> HookKeyframeGroup:
        """A group with copies of the keyframes, at the first of them."""
        copied = type(self)()
        copied.keyframes = [keyframe.clone() for keyframe in self.keyframes]
        copied._set_first_as_current()
        return copied

    def initialize_timesteps(self, model: Any) -> None:
        """Learn from a model which sigma each start percent is."""
        for keyframe in self.keyframes:
            keyframe.start_t = model.model_sampling.percent_to_sigma(keyframe.start_percent)

    def prepare_current_keyframe(self, curr_t: Any, transformer_options: dict[str, Any]) -> bool:
        """Move to the keyframe of a step; returns whether the strength changed.

        Args:
            curr_t: Sigma of the step.
            transformer_options: Of the run; `sample_sigmas` holds its sigmas.
        """
        if self.is_empty() or curr_t == self._curr_t:
            return False
        assert self._current_keyframe is not None
        max_sigma = torch.max(transformer_options["sample_sigmas"])
        before = (self._current_index, self._current_keyframe.strength)
        due = self._current_keyframe.get_effective_guarantee_steps(max_sigma)
        if self._current_used_steps >= due:
            self._advance(curr_t, max_sigma)
        self._current_used_steps += 1
        self._curr_t = curr_t
        index, strength = before
        return index != self._current_index and strength != self._current_keyframe.strength

    def _advance(self, curr_t: Any, max_sigma: Any) -> None:
        """Take the last keyframe that has started, or the first of them that guarantees steps."""
        for index in range(self._current_index + 1, len(self.keyframes)):
            keyframe = self.keyframes[index]
            if keyframe.start_t < curr_t:
                return
            self._current_index, self._current_keyframe = index, keyframe
            self._current_used_steps = 0
            if keyframe.get_effective_guarantee_steps(max_sigma) > 0:
                return


class InterpolationMethod:
    """Ways to go from one value to another."""

    LINEAR = "linear"
    EASE_IN = "ease_in"
    EASE_OUT = "ease_out"
    EASE_IN_OUT = "ease_in_out"

    _LIST = (LINEAR, EASE_IN, EASE_OUT, EASE_IN_OUT)

    @classmethod
    def get_weights(
        cls,
        num_from: float,
        num_to: float,
        length: int,
        method: str,
        reverse: bool = False,
    ) -> list[float]:
        """`length` values from one number to another.

        Raises:
            ValueError: Unknown method.
        """
        shapes = {
            cls.LINEAR: lambda x: x,
            cls.EASE_IN: lambda x: x**2,
            cls.EASE_OUT: lambda x: x * (2 - x),
            cls.EASE_IN_OUT: lambda x: 3 * x**2 - 2 * x**3,
        }
        if method not in shapes:
            raise ValueError(f"unknown interpolation '{method}'; known: {', '.join(cls._LIST)}")
        steps = [i / (length - 1) if length > 1 else 0.0 for i in range(length)]
        values = [num_from + (num_to - num_from) * shapes[method](x) for x in steps]
        return values[::-1] if reverse else values


def schedule_ranges(keyframes: list[HookKeyframe]) -> list[tuple[tuple[float, float], Any]]:
    """((start, end), keyframe) of every stretch of constant strength; None without keyframes."""
    if not keyframes:
        return [((0.0, 1.0), None)]
    ranges: list[tuple[tuple[float, float], Any]] = []
    current = keyframes[0]
    for keyframe in keyframes:
        if keyframe.start_percent == current.start_percent:
            current = keyframe
        elif not math.isclose(keyframe.strength, current.strength):
            ranges.append(((current.start_percent, keyframe.start_percent), current))
            current = keyframe
    if not math.isclose(current.start_percent, 1.0):
        ranges.append(((current.start_percent, 1.0), current))
    return ranges
