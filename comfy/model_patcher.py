"""Model patchers, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.patching import dynamic
from comfy.patching.attributes import get_key_weight
from comfy.patching.dynamic import ModelPatcherDynamic
from comfy.patching.lowvram import LowVramPatch, low_vram_patch_estimate_vram
from comfy.patching.options import (
    create_model_options_clone,
    set_model_options_patch_replace,
    set_model_options_post_cfg_function,
    set_model_options_pre_cfg_function,
)
from comfy.patching.patcher import ModelPatcher
from comfy.patching.wrappers import CallbacksMP, PatcherInjection, WrappersMP
from comfy.public import write_through
from comfy.quant_ops import QuantizedTensor
from comfy.weights.rounding import string_to_seed

write_through(__name__, {"CoreModelPatcher": dynamic.core_patcher_class})
