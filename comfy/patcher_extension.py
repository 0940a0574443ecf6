"""Callbacks, wrappers and injections, under the names custom nodes import."""
# ruff: noqa: F401

from comfy.nn.wrappers import WrapperExecutor
from comfy.patching.wrappers import (
    CallbacksMP,
    PatcherInjection,
    WrappersMP,
    add_callback,
    add_callback_with_key,
    add_wrapper,
    add_wrapper_with_key,
    copy_nested_dicts,
    get_all_callbacks,
    get_all_wrappers,
    get_callbacks_with_key,
    get_wrappers_with_key,
    merge_nested_dicts,
)
from comfy.public import write_through

write_through(__name__)
