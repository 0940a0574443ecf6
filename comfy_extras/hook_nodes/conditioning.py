"""Nodes that put hooks, masks and ranges on conditioning, and hooks on a text encoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comfy.patching import hook_conditioning
from comfy.patching.hook_group import HookGroup
from comfy.patching.hooks import EnumWeightTarget, create_target_dict
from comfy_extras.hook_nodes.common import HOOKS, HookNode, percent
from comfy_nodes.conditioning import Conditioning

Range = tuple[float, float]

AREAS = ["default", "mask bounds"]
CONDITIONING = ("CONDITIONING",)
PAIR = ("CONDITIONING", "CONDITIONING")
PAIR_NAMES = ("positive", "negative")
PROPERTIES = {
    "strength": ("FLOAT", {"default": 1.0, "min": 0.0, "max": 10.0, "step": 0.01}),
    "set_cond_area": (AREAS,),
}
OPTIONAL_PROPERTIES = {"mask": ("MASK",), **HOOKS, "timesteps": ("TIMESTEPS_RANGE",)}


class PairConditioningSetProperties(HookNode):
    """Sets strength, mask, hooks and range of a pair of conditionings."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        names = ("positive_NEW", "negative_NEW")
        required = {**dict.fromkeys(names, CONDITIONING), **PROPERTIES}
        return {"required": required, "optional": dict(OPTIONAL_PROPERTIES)}

    RETURN_TYPES = PAIR
    RETURN_NAMES = PAIR_NAMES
    CATEGORY = "advanced/hooks/cond pair"

    def run(
        self,
        positive_NEW: Conditioning,
        negative_NEW: Conditioning,
        strength: float,
        set_cond_area: str,
        mask: Tensor | None = None,
        hooks: HookGroup | None = None,
        timesteps: Range | None = None,
    ) -> tuple[Conditioning, ...]:
        """The pair with its properties."""
        return tuple(
            hook_conditioning.set_conds_props(
                [positive_NEW, negative_NEW], strength, set_cond_area, mask, hooks, timesteps
            )
        )


class PairConditioningSetPropertiesAndCombine(HookNode):
    """Sets properties of a pair of conditionings and adds it to another pair."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        names = ("positive", "negative", "positive_NEW", "negative_NEW")
        required = {**dict.fromkeys(names, CONDITIONING), **PROPERTIES}
        return {"required": required, "optional": dict(OPTIONAL_PROPERTIES)}

    RETURN_TYPES = PAIR
    RETURN_NAMES = PAIR_NAMES
    CATEGORY = "advanced/hooks/cond pair"

    def run(
        self,
        positive: Conditioning,
        negative: Conditioning,
        positive_NEW: Conditioning,
        negative_NEW: Conditioning,
        strength: float,
        set_cond_area: str,
        mask: Tensor | None = None,
        hooks: HookGroup | None = None,
        timesteps: Range | None = None,
    ) -> tuple[Conditioning, ...]:
        """Both pairs together."""
        return tuple(
            hook_conditioning.set_conds_props_and_combine(
                [positive, negative],
                [positive_NEW, negative_NEW],
                strength,
                set_cond_area,
                mask,
                hooks,
                timesteps,
            )
        )


class ConditioningSetProperties(HookNode):
    """Sets strength, mask, hooks and range of a conditioning."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        required = {"cond_NEW": CONDITIONING, **PROPERTIES}
        return {"required": required, "optional": dict(OPTIONAL_PROPERTIES)}

    RETURN_TYPES = CONDITIONING
    CATEGORY = "advanced/hooks/cond single"

    def run(
        self,
        cond_NEW: Conditioning,
        strength: float,
        set_cond_area: str,
        mask: Tensor | None = None,
        hooks: HookGroup | None = None,
        timesteps: Range | None = None,
    ) -> tuple[Conditioning, ...]:
        """The conditioning with its properties."""
        return tuple(
            hook_conditioning.set_conds_props(
                [cond_NEW], strength, set_cond_area, mask, hooks, timesteps
            )
        )


class ConditioningSetPropertiesAndCombine(HookNode):
    """Sets properties of a conditioning and adds it to another one."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        required = {"cond": CONDITIONING, "cond_NEW": CONDITIONING, **PROPERTIES}
        return {"required": required, "optional": dict(OPTIONAL_PROPERTIES)}

    RETURN_TYPES = CONDITIONING
    CATEGORY = "advanced/hooks/cond single"

    def run(
        self,
        cond: Conditioning,
        cond_NEW: Conditioning,
        strength: float,
        set_cond_area: str,
        mask: Tensor | None = None,
        hooks: HookGroup | None = None,
        timesteps: Range | None = None,
    ) -> tuple[Conditioning, ...]:
        """Both conditionings together."""
        return tuple(
            hook_conditioning.set_conds_props_and_combine(
                [cond], [cond_NEW], strength, set_cond_area, mask, hooks, timesteps
            )
        )


class PairConditioningCombine(HookNode):
    """Joins two pairs of conditionings."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        names = ("positive_A", "negative_A", "positive_B", "negative_B")
        return {"required": dict.fromkeys(names, CONDITIONING)}

    RETURN_TYPES = PAIR
    RETURN_NAMES = PAIR_NAMES
    CATEGORY = "advanced/hooks/cond pair"

    def run(
        self,
        positive_A: Conditioning,
        negative_A: Conditioning,
        positive_B: Conditioning,
        negative_B: Conditioning,
    ) -> tuple[Conditioning, ...]:
        """Both pairs together."""
        return tuple(
            hook_conditioning.combine_with_new_conds(
                [positive_A, negative_A], [positive_B, negative_B]
            )
        )


class PairConditioningSetDefaultCombine(HookNode):
    """Adds a pair of conditionings that applies wherever no other does."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        names = ("positive", "negative", "positive_DEFAULT", "negative_DEFAULT")
        return {"required": dict.fromkeys(names, CONDITIONING), "optional": dict(HOOKS)}

    RETURN_TYPES = PAIR
    RETURN_NAMES = PAIR_NAMES
    CATEGORY = "advanced/hooks/cond pair"

    def run(
        self,
        positive: Conditioning,
        negative: Conditioning,
        positive_DEFAULT: Conditioning,
        negative_DEFAULT: Conditioning,
        hooks: HookGroup | None = None,
    ) -> tuple[Conditioning, ...]:
        """Both pairs together, the second marked as default."""
        return tuple(
            hook_conditioning.set_default_conds_and_combine(
                [positive, negative], [positive_DEFAULT, negative_DEFAULT], hooks
            )
        )


class ConditioningSetDefaultCombine(HookNode):
    """Adds a conditioning that applies wherever no other does."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        required = {"cond": CONDITIONING, "cond_DEFAULT": CONDITIONING}
        return {"required": required, "optional": dict(HOOKS)}

    RETURN_TYPES = CONDITIONING
    CATEGORY = "advanced/hooks/cond single"

    def run(
        self, cond: Conditioning, cond_DEFAULT: Conditioning, hooks: HookGroup | None = None
    ) -> tuple[Conditioning, ...]:
        """Both conditionings together, the second marked as default."""
        return tuple(hook_conditioning.set_default_conds_and_combine([cond], [cond_DEFAULT], hooks))


class SetClipHooks(HookNode):
    """Lets hooks change a text encoder, and what it encodes."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        required = {
            "clip": ("CLIP",),
            "apply_to_conds": ("BOOLEAN", {"default": True}),
            "schedule_clip": ("BOOLEAN", {"default": False}),
        }
        return {"required": required, "optional": dict(HOOKS)}

    RETURN_TYPES = ("CLIP",)
    CATEGORY = "advanced/hooks/clip"

    def run(
        self, clip: Any, schedule_clip: bool, apply_to_conds: bool, hooks: HookGroup | None = None
    ) -> tuple[Any]:
        """A view of the text encoder.

        Args:
            schedule_clip: Encode once for each stretch of the hooks' schedule.
            apply_to_conds: Put the hooks on what is encoded.
        """
        view = clip.clone()
        if hooks is None:
            return (view,)
        if apply_to_conds:
            view.apply_hooks_to_conds = hooks
        view.patcher.forced_hooks = hooks.clone()
        view.use_clip_schedule = schedule_clip
        if not schedule_clip:
            view.patcher.forced_hooks.set_keyframes_on_hooks(None)
        view.patcher.register_all_hook_patches(hooks, create_target_dict(EnumWeightTarget.Clip))
        return (view,)

    apply_hooks = run


class ConditioningTimestepsRange(HookNode):
    """A part of the sampling, and the parts before and after it."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"start_percent": percent(0.0), "end_percent": percent(1.0)}}

    RETURN_TYPES = ("TIMESTEPS_RANGE", "TIMESTEPS_RANGE", "TIMESTEPS_RANGE")
    RETURN_NAMES = ("TIMESTEPS_RANGE", "BEFORE_RANGE", "AFTER_RANGE")
    CATEGORY = "advanced/hooks"

    def run(self, start_percent: float, end_percent: float) -> tuple[Range, Range, Range]:
        """The three ranges."""
        return ((start_percent, end_percent), (0.0, start_percent), (end_percent, 1.0))
