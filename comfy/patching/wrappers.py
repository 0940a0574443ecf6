"""Extension points of a view: callbacks, wrappers around calls, injections into the model.

Tables are dicts type -> key -> list of functions; key None is for functions without an owner.
The same tables exist on a patcher and, for one run, in `transformer_options`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Table = dict[str, dict[Any, list[Callable[..., Any]]]]


class CallbacksMP:
    """Moments in the life of a model patcher at which callbacks run."""

    ON_CLONE = "on_clone"
    ON_LOAD = "on_load_after"
    ON_DETACH = "on_detach_after"
    ON_CLEANUP = "on_cleanup"
    ON_PRE_RUN = "on_pre_run"
    ON_PREPARE_STATE = "on_prepare_state"
    ON_APPLY_HOOKS = "on_apply_hooks"
    ON_REGISTER_ALL_HOOK_PATCHES = "on_register_all_hook_patches"
    ON_INJECT_MODEL = "on_inject_model"
    ON_EJECT_MODEL = "on_eject_model"

    @classmethod
    def init_callbacks(cls) -> Table:
        """An empty table."""
        return {}


class WrappersMP:
    """Calls that wrappers may go around."""

    OUTER_SAMPLE = "outer_sample"
    PREPARE_SAMPLING = "prepare_sampling"
    SAMPLER_SAMPLE = "sampler_sample"
    PREDICT_NOISE = "predict_noise"
    CALC_COND_BATCH = "calc_cond_batch"
    APPLY_MODEL = "apply_model"
    DIFFUSION_MODEL = "diffusion_model"

    @classmethod
    def init_wrappers(cls) -> Table:
        """An empty table."""
        return {}


def add_callback(
    call_type: str,
    callback: Callable[..., Any],
    transformer_options: dict[str, Any],
    is_model_options: bool = False,
) -> None:
    """`add_callback_with_key` without an owner."""
    add_callback_with_key(call_type, None, callback, transformer_options, is_model_options)


def add_callback_with_key(
    call_type: str,
    key: Any,
    callback: Callable[..., Any],
    transformer_options: dict[str, Any],
    is_model_options: bool = False,
) -> None:
    """Append a callback to a run's options."""
    _append("callbacks", call_type, key, callback, transformer_options, is_model_options)


def add_wrapper(
    wrapper_type: str,
    wrapper: Callable[..., Any],
    transformer_options: dict[str, Any],
    is_model_options: bool = False,
) -> None:
    """`add_wrapper_with_key` without an owner."""
    add_wrapper_with_key(wrapper_type, None, wrapper, transformer_options, is_model_options)


def add_wrapper_with_key(
    wrapper_type: str,
    key: Any,
    wrapper: Callable[..., Any],
    transformer_options: dict[str, Any],
    is_model_options: bool = False,
) -> None:
    """Append a wrapper to a run's options."""
    _append("wrappers", wrapper_type, key, wrapper, transformer_options, is_model_options)


def _append(
    kind: str,
    call_type: str,
    key: Any,
    function: Callable[..., Any],
    options: dict[str, Any],
    is_model_options: bool,
) -> None:
    if is_model_options:
        options = options.setdefault("transformer_options", {})
    options.setdefault(kind, {}).setdefault(call_type, {}).setdefault(key, []).append(function)


def get_wrappers_with_key(
    wrapper_type: str, key: Any, transformer_options: dict[str, Any], is_model_options: bool = False
) -> list[Callable[..., Any]]:
    """Wrappers of one type and owner."""
    return list(
        _table("wrappers", wrapper_type, transformer_options, is_model_options).get(key, ())
    )


def get_all_wrappers(
    wrapper_type: str, transformer_options: dict[str, Any], is_model_options: bool = False
) -> list[Callable[..., Any]]:
    """Wrappers of one type, in order of addition by owner."""
    return _flat(_table("wrappers", wrapper_type, transformer_options, is_model_options))


def get_callbacks_with_key(
    call_type: str, key: Any, transformer_options: dict[str, Any], is_model_options: bool = False
) -> list[Callable[..., Any]]:
    """Callbacks of one type and owner."""
    return list(_table("callbacks", call_type, transformer_options, is_model_options).get(key, ()))


def get_all_callbacks(
    call_type: str, transformer_options: dict[str, Any], is_model_options: bool = False
) -> list[Callable[..., Any]]:
    """Callbacks of one type, in order of addition by owner."""
    return _flat(_table("callbacks", call_type, transformer_options, is_model_options))


def _table(
    kind: str, call_type: str, options: dict[str, Any], is_model_options: bool
) -> dict[Any, list[Callable[..., Any]]]:
    if is_model_options:
        options = options.get("transformer_options", {})
    return options.get(kind, {}).get(call_type, {})


def _flat(table: dict[Any, list[Callable[..., Any]]]) -> list[Callable[..., Any]]:
    return [function for functions in table.values() for function in functions]


class PatcherInjection:
    """A reversible change of the running model, made by code.

    Args:
        inject: Called with the patcher when the model is loaded.
        eject: Its inverse.
    """

    def __init__(self, inject: Callable[[Any], Any], eject: Callable[[Any], Any]) -> None:
        self.inject = inject
        self.eject = eject


def copy_nested_dicts(input_dict: dict[Any, Any]) -> dict[Any, Any]:
    """A copy that shares neither dicts nor lists with the original, at any depth."""
    return {
        key: copy_nested_dicts(value)
        if isinstance(value, dict)
        else value.copy()
        if isinstance(value, list)
        else value
        for key, value in input_dict.items()
    }


def merge_nested_dicts(
    dict1: dict[Any, Any], dict2: dict[Any, Any], copy_dict1: bool = True
) -> dict[Any, Any]:
    """`dict1` with the entries of `dict2`: dicts merge, lists extend, the rest is replaced.

    Args:
        copy_dict1: Leave `dict1` alone and return a copy.
    """
    merged = copy_nested_dicts(dict1) if copy_dict1 else dict1
    for key, value in dict2.items():
        held = merged.get(key)
        if isinstance(value, dict):
            merged[key] = merge_nested_dicts(held if isinstance(held, dict) else {}, value)
        elif isinstance(value, list):
            merged[key] = [*(held if isinstance(held, list) else []), *value]
        else:
            merged[key] = value
    return merged


class ExtensionPoints:
    """The callbacks, wrappers, attachments, additional models and injections of a patcher."""

    callbacks: Table
    wrappers: Table
    attachments: dict[str, Any]
    additional_models: dict[str, list[Any]]
    injections: dict[str, list[PatcherInjection]]
    is_injected: bool
    skip_injection: bool
    currently_injected: list[PatcherInjection]

    def add_callback(self, call_type: str, callback: Callable[..., Any]) -> None:
        """Append a callback without an owner."""
        self.add_callback_with_key(call_type, None, callback)

    def add_callback_with_key(self, call_type: str, key: Any, callback: Callable[..., Any]) -> None:
        """Append a callback under its owner's key."""
        self.callbacks.setdefault(call_type, {}).setdefault(key, []).append(callback)

    def remove_callbacks_with_key(self, call_type: str, key: Any) -> None:
        """Remove an owner's callbacks of one type."""
        self.callbacks.get(call_type, {}).pop(key, None)

    def get_callbacks(self, call_type: str, key: Any) -> list[Callable[..., Any]]:
        """An owner's callbacks of one type."""
        return list(self.callbacks.get(call_type, {}).get(key, ()))

    def get_all_callbacks(self, call_type: str) -> list[Callable[..., Any]]:
        """All callbacks of one type."""
        return _flat(self.callbacks.get(call_type, {}))

    def add_wrapper(self, wrapper_type: str, wrapper: Callable[..., Any]) -> None:
        """Append a wrapper without an owner."""
        self.add_wrapper_with_key(wrapper_type, None, wrapper)

    def add_wrapper_with_key(
        self, wrapper_type: str, key: Any, wrapper: Callable[..., Any]
    ) -> None:
        """Append a wrapper under its owner's key."""
        self.wrappers.setdefault(wrapper_type, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, wrapper_type: str, key: Any) -> None:
        """Remove an owner's wrappers of one type."""
        self.wrappers.get(wrapper_type, {}).pop(key, None)

    def get_wrappers(self, wrapper_type: str, key: Any) -> list[Callable[..., Any]]:
        """An owner's wrappers of one type."""
        return list(self.wrappers.get(wrapper_type, {}).get(key, ()))

    def get_all_wrappers(self, wrapper_type: str) -> list[Callable[..., Any]]:
        """All wrappers of one type."""
        return _flat(self.wrappers.get(wrapper_type, {}))

    def set_attachments(self, key: str, attachment: Any) -> None:
        """Attach an object; a clone gets `attachment.on_model_patcher_clone()` or the object."""
        self.attachments[key] = attachment

    def remove_attachments(self, key: str) -> None:
        """Remove an attached object."""
        self.attachments.pop(key, None)

    def get_attachment(self, key: str) -> Any | None:
        """An attached object, or None."""
        return self.attachments.get(key)

    def set_injections(self, key: str, injections: list[PatcherInjection]) -> None:
        """Set an owner's injections."""
        self.injections[key] = injections

    def remove_injections(self, key: str) -> None:
        """Remove an owner's injections."""
        self.injections.pop(key, None)

    def get_injections(self, key: str) -> list[PatcherInjection] | None:
        """An owner's injections, or None."""
        return self.injections.get(key)

    def set_additional_models(self, key: str, models: list[Any]) -> None:
        """Set the patchers that are loaded whenever this one is."""
        self.additional_models[key] = models

    def remove_additional_models(self, key: str) -> None:
        """Forget an owner's additional models."""
        self.additional_models.pop(key, None)

    def get_additional_models_with_key(self, key: str) -> list[Any]:
        """An owner's additional models."""
        return self.additional_models.get(key, [])

    def get_additional_models(self) -> list[Any]:
        """All additional models."""
        return [model for models in self.additional_models.values() for model in models]

    def get_nested_additional_models(self) -> list[Any]:
        """All additional models, theirs too, each once."""
        found: list[Any] = []
        waiting = self.get_additional_models()
        while waiting:
            model = waiting.pop(0)
            if not any(model is seen for seen in found):
                found.append(model)
                waiting.extend(model.get_additional_models())
        return found

    def copy_extensions_to(self, n: ExtensionPoints) -> None:
        """Give a clone its own tables."""
        n.callbacks = copy_nested_dicts(self.callbacks)
        n.wrappers = copy_nested_dicts(self.wrappers)
        n.attachments = {key: _cloned_attachment(a) for key, a in self.attachments.items()}
        n.additional_models = {
            key: [model.clone() if hasattr(model, "clone") else model for model in models]
            for key, models in self.additional_models.items()
        }
        n.injections = {key: list(items) for key, items in self.injections.items()}


def _cloned_attachment(attachment: Any) -> Any:
    if hasattr(attachment, "on_model_patcher_clone"):
        return attachment.on_model_patcher_clone()
    if isinstance(attachment, (dict, list)):
        return copy.copy(attachment)
    return attachment
