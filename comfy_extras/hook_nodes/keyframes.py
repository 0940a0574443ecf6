"""Nodes that schedule the strength of hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from comfy.patching.hook_group import HookGroup
from comfy.patching.keyframes import HookKeyframe, HookKeyframeGroup, InterpolationMethod
from comfy_extras.hook_nodes.common import HOOKS, STRENGTH, HookNode, percent

logger = logging.getLogger(__name__)


class SetHookKeyframes(HookNode):
    """Gives hooks a schedule of their strength."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": dict(HOOKS), "optional": {"hook_kf": ("HOOK_KEYFRAMES",)}}

    RETURN_TYPES = ("HOOKS",)
    CATEGORY = "advanced/hooks/scheduling"

    def run(self, hooks: HookGroup, hook_kf: HookKeyframeGroup | None = None) -> tuple[HookGroup]:
        """Copies of the hooks with the schedule."""
        if hook_kf is not None:
            hooks = hooks.clone()
            hooks.set_keyframes_on_hooks(hook_kf=hook_kf)
        return (hooks,)


def schedule_after(previous: HookKeyframeGroup | None) -> HookKeyframeGroup:
    """A copy of a schedule to add to, or an empty one."""
    return HookKeyframeGroup() if previous is None else previous.clone()


def add_keyframes(
    schedule: HookKeyframeGroup, strengths: Iterable[float], percents: Iterable[float], log: bool
) -> None:
    """Add keyframes in order; only the first holds for a step in any case."""
    for place, (strength, start) in enumerate(zip(strengths, percents)):
        schedule.add(HookKeyframe(strength, start, guarantee_steps=1 if place == 0 else 0))
        if log:
            logger.info("hook keyframe: from %.4f of the sampling strength %.4f", start, strength)


class CreateHookKeyframe(HookNode):
    """One strength from a part of the sampling on."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "strength_mult": ("FLOAT", dict(STRENGTH)),
                "start_percent": percent(0.0),
            },
            "optional": {"prev_hook_kf": ("HOOK_KEYFRAMES",)},
        }

    RETURN_TYPES = ("HOOK_KEYFRAMES",)
    RETURN_NAMES = ("HOOK_KF",)
    CATEGORY = "advanced/hooks/scheduling"

    def run(
        self,
        strength_mult: float,
        start_percent: float,
        prev_hook_kf: HookKeyframeGroup | None = None,
    ) -> tuple[HookKeyframeGroup]:
        """The schedule with the keyframe."""
        schedule = schedule_after(prev_hook_kf)
        schedule.add(HookKeyframe(strength_mult, start_percent))
        return (schedule,)


class CreateHookKeyframesInterpolated(HookNode):
    """Strengths that change evenly over a part of the sampling."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        strength = {"default": 1.0, "min": 0.0, "max": 10.0, "step": 0.001}
        return {
            "required": {
                "strength_start": ("FLOAT", dict(strength)),
                "strength_end": ("FLOAT", dict(strength)),
                "interpolation": (list(InterpolationMethod._LIST),),
                "start_percent": percent(0.0),
                "end_percent": percent(1.0),
                "keyframes_count": ("INT", {"default": 5, "min": 2, "max": 100, "step": 1}),
                "print_keyframes": ("BOOLEAN", {"default": False}),
            },
            "optional": {"prev_hook_kf": ("HOOK_KEYFRAMES",)},
        }

    RETURN_TYPES = ("HOOK_KEYFRAMES",)
    RETURN_NAMES = ("HOOK_KF",)
    CATEGORY = "advanced/hooks/scheduling"

    def run(
        self,
        strength_start: float,
        strength_end: float,
        interpolation: str,
        start_percent: float,
        end_percent: float,
        keyframes_count: int,
        print_keyframes: bool = False,
        prev_hook_kf: HookKeyframeGroup | None = None,
    ) -> tuple[HookKeyframeGroup]:
        """The schedule with the keyframes."""
        schedule = schedule_after(prev_hook_kf)
        between = InterpolationMethod.get_weights
        percents = between(start_percent, end_percent, keyframes_count, InterpolationMethod.LINEAR)
        strengths = between(strength_start, strength_end, keyframes_count, interpolation)
        add_keyframes(schedule, strengths, percents, print_keyframes)
        return (schedule,)


class CreateHookKeyframesFromFloats(HookNode):
    """Given strengths, spread evenly over a part of the sampling."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        floats = {"default": -1, "min": -1, "step": 0.001, "forceInput": True}
        return {
            "required": {
                "floats_strength": ("FLOATS", floats),
                "start_percent": percent(0.0),
                "end_percent": percent(1.0),
                "print_keyframes": ("BOOLEAN", {"default": False}),
            },
            "optional": {"prev_hook_kf": ("HOOK_KEYFRAMES",)},
        }

    RETURN_TYPES = ("HOOK_KEYFRAMES",)
    RETURN_NAMES = ("HOOK_KF",)
    CATEGORY = "advanced/hooks/scheduling"

    def run(
        self,
        floats_strength: Any,
        start_percent: float,
        end_percent: float,
        print_keyframes: bool = False,
        prev_hook_kf: HookKeyframeGroup | None = None,
    ) -> tuple[HookKeyframeGroup]:
        """The schedule with the keyframes.

        Raises:
            TypeError: The strengths are neither a number nor several.
        """
        if isinstance(floats_strength, (int, float)):
            floats_strength = [float(floats_strength)]
        if not isinstance(floats_strength, Iterable):
            kind = type(floats_strength).__name__
            raise TypeError(f"floats_strength must be a number or a list of numbers, not {kind}")
        strengths = [float(strength) for strength in floats_strength]
        percents = InterpolationMethod.get_weights(
            start_percent, end_percent, len(strengths), InterpolationMethod.LINEAR
        )
        schedule = schedule_after(prev_hook_kf)
        add_keyframes(schedule, strengths, percents, print_keyframes)
        return (schedule,)
