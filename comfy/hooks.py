"""Hooks, their schedules, and conditioning that carries them, under the names nodes import."""
# ruff: noqa: F401

from comfy.patching.hook_conditioning import (
    combine_conditioning,
    combine_with_new_conds,
    conditioning_set_values,
    conditioning_set_values_with_hooks,
    set_conds_props,
    set_conds_props_and_combine,
    set_default_conds_and_combine,
    set_hooks_for_conditioning,
    set_mask_for_conditioning,
    set_timestep_for_conditioning,
)
from comfy.patching.hook_group import (
    HookGroup,
    create_hook_lora,
    create_hook_model_as_lora,
    create_transformer_options_from_hooks,
    get_patch_weights_from_model,
    get_sorted_list_via_attr,
    load_hook_lora_for_models,
)
from comfy.patching.hooks import (
    AdditionalModelsHook,
    EnumHookMode,
    EnumHookScope,
    EnumHookType,
    EnumWeightTarget,
    Hook,
    InjectionsHook,
    ObjectPatchHook,
    TransformerOptionsHook,
    WeightHook,
    WrapperHook,
    _HookRef,
    create_target_dict,
    default_should_register,
)
from comfy.patching.keyframes import HookKeyframe, HookKeyframeGroup, InterpolationMethod
from comfy.public import write_through

write_through(__name__)
