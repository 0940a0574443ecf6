"""Preparation of runs, under the names custom nodes import."""
# ruff: noqa: F401

import comfy.utils  # packs reach the helpers through this module, too
from comfy.public import write_through
from comfy.sampling.conditioning import convert_cond
from comfy.sampling.hooked import get_hooks_from_cond
from comfy.sampling.masks import prepare_mask
from comfy.sampling.preparation import (
    cast_to_load_options,
    cleanup_additional_models,
    cleanup_models,
    estimate_memory,
    get_additional_models,
    get_models_from_cond,
    prepare_model_patcher,
    prepare_sampling,
)

write_through(__name__)
