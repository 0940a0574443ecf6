"""Whether two views of one base module execute identically: weights, objects, options, hooks."""

from __future__ import annotations

from typing import Any

from comfy.patching.hook_group import same_hooks

EXECUTION_TABLES = (
    "object_patches", "model_options", "weight_wrapper_patches", "callbacks", "wrappers",
    "injections",
)  # fmt: skip
"""Tables of a patcher whose contents change how it executes."""

OWNED_TABLES = ("hook_patches", "attachments", "additional_models")
"""Tables whose values every clone copies, so that only their keys can be compared."""


def same_execution(a: Any, b: Any) -> bool:
    """Whether two patchers of one module change weights, objects, options and hooks alike."""
    return (
        same_weight_patches(a, b)
        and all(same_items(getattr(a, name), getattr(b, name)) for name in EXECUTION_TABLES)
        and all(getattr(a, name).keys() == getattr(b, name).keys() for name in OWNED_TABLES)
        and same_hooks(a.forced_hooks, b.forced_hooks)
        and same_hooks(a.current_hooks, b.current_hooks)
    )


def same_weight_patches(a: Any, b: Any) -> bool:
    """Whether two patchers patch the same weights in the same way.

    The identity of the patches decides quickly; it changes with every call of `add_patches`, so
    two views without any patches are alike whatever it says.
    """
    if a.force_cast_weights != b.force_cast_weights or a.patches.keys() != b.patches.keys():
        return False
    if not a.patches:
        return True
    return a.patches_uuid == b.patches_uuid and all(
        same_objects(a.patches[key], b.patches[key]) for key in a.patches
    )


def same_objects(a: Any, b: Any) -> bool:
    """Whether two sequences hold the same objects in the same order."""
    return len(a) == len(b) and all(x is y for x, y in zip(a, b))


def same_items(a: Any, b: Any) -> bool:
    """Whether two trees of dicts and lists hold the same objects."""
    if a is b:
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_items(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, type(a)):
        return len(a) == len(b) and all(same_items(x, y) for x, y in zip(a, b))
    return isinstance(a, (bool, int, float, str)) and bool(a == b)
