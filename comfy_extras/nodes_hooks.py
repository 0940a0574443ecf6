"""Hooks: changes of a model that apply to some conditioning only, and their schedules."""

from __future__ import annotations

from comfy_extras.hook_nodes.conditioning import (
    ConditioningSetDefaultCombine,
    ConditioningSetProperties,
    ConditioningSetPropertiesAndCombine,
    ConditioningTimestepsRange,
    PairConditioningCombine,
    PairConditioningSetDefaultCombine,
    PairConditioningSetProperties,
    PairConditioningSetPropertiesAndCombine,
    SetClipHooks,
)
from comfy_extras.hook_nodes.hooks import (
    CombineHooks2,
    CombineHooks4,
    CombineHooks8,
    CreateHookLora,
    CreateHookLoraModelOnly,
    CreateHookModelAsLora,
    CreateHookModelAsLoraModelOnly,
)
from comfy_extras.hook_nodes.keyframes import (
    CreateHookKeyframe,
    CreateHookKeyframesFromFloats,
    CreateHookKeyframesInterpolated,
    SetHookKeyframes,
)

TITLES: dict[type, str] = {
    CreateHookLora: "Create Hook LoRA",
    CreateHookLoraModelOnly: "Create Hook LoRA (MO)",
    CreateHookModelAsLora: "Create Hook Model as LoRA",
    CreateHookModelAsLoraModelOnly: "Create Hook Model as LoRA (MO)",
    SetHookKeyframes: "Set Hook Keyframes",
    CreateHookKeyframe: "Create Hook Keyframe",
    CreateHookKeyframesInterpolated: "Create Hook Keyframes Interp.",
    CreateHookKeyframesFromFloats: "Create Hook Keyframes From Floats",
    CombineHooks2: "Combine Hooks [2]",
    CombineHooks4: "Combine Hooks [4]",
    CombineHooks8: "Combine Hooks [8]",
    ConditioningSetProperties: "Cond Set Props",
    ConditioningSetPropertiesAndCombine: "Cond Set Props Combine",
    PairConditioningSetProperties: "Cond Pair Set Props",
    PairConditioningSetPropertiesAndCombine: "Cond Pair Set Props Combine",
    ConditioningSetDefaultCombine: "Cond Set Default Combine",
    PairConditioningSetDefaultCombine: "Cond Pair Set Default Combine",
    PairConditioningCombine: "Cond Pair Combine",
    SetClipHooks: "Set CLIP Hooks",
    ConditioningTimestepsRange: "Timesteps Range",
}

NODE_CLASS_MAPPINGS = {node.__name__: node for node in TITLES}
NODE_DISPLAY_NAME_MAPPINGS = {node.__name__: title for node, title in TITLES.items()}
