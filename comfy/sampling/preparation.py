"""Around a run: which models it needs, loading them, and undoing everything afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from comfy.devices import residency
from comfy.nn.wrappers import run_wrapped
from comfy.patching.options import create_model_options_clone
from comfy.patching.wrappers import merge_nested_dicts
from comfy.sampling import hooked

CondLists = dict[str, list[dict[str, Any]]]


def get_models_from_cond(cond: Iterable[dict[str, Any]], model_type: str) -> list[Any]:
    """Values of one option over a list's entries, lists flattened."""
    models: list[Any] = []
    for entry in cond:
        if model_type in entry:
            value = entry[model_type]
            models += value if isinstance(value, list) else [value]
    return models


def _unique(items: Iterable[Any]) -> list[Any]:
    return list({id(item): item for item in items}.values())


def get_additional_models(conds: CondLists, dtype: torch.dtype | None) -> tuple[list[Any], float]:
    """Models that conditioning brings along, and the bytes of their evaluation."""
    entries = [entry for name in conds for entry in conds[name]]
    controls = _unique(get_models_from_cond(entries, "control"))
    models = _companions(entries, controls)
    models += _unique(get_models_from_cond(entries, "additional_models"))
    models += hooked.hook_models(conds)
    inference = sum(control.inference_memory_requirements(dtype) for control in controls)
    return _unique(models), inference


def _companions(entries: Sequence[dict[str, Any]], controls: Iterable[Any]) -> list[Any]:
    """Patchers of networks that are evaluated inside the model's own evaluation."""
    models = _unique(model for control in controls for model in control.get_models())
    models += _unique(gligen[1] for gligen in get_models_from_cond(entries, "gligen_model"))
    models += _unique(entry["gligen"][1] for entry in entries if entry.get("gligen") is not None)
    return models


def run_beside(model: Any, conds: CondLists) -> None:
    """Have control networks run on the device of the model that they see the latents of."""
    entries = [entry for name in conds for entry in conds[name]]
    controls = _unique(get_models_from_cond(entries, "control"))
    for companion in _companions(entries, controls):
        if companion.load_device != model.load_device:
            companion.load_device = model.load_device


def cleanup_additional_models(models: Iterable[Any]) -> None:
    """Tell every model that has a `cleanup` that the run is over."""
    for model in models:
        if hasattr(model, "cleanup"):
            model.cleanup()


def cleanup_models(conds: CondLists, models: Iterable[Any]) -> None:
    """Clean up after a run: its additional models and the control nets of its conditioning."""
    cleanup_additional_models(models)
    controls = [
        control for name in conds for control in get_models_from_cond(conds[name], "control")
    ]
    cleanup_additional_models(_unique(controls))


def estimate_memory(
    model: Any, noise_shape: Sequence[int], conds: CondLists
) -> tuple[float, float]:
    """Bytes of a model call with positive and negative together, and of the largest alone."""
    shapes: dict[str, list[Sequence[int]]] = {}
    largest: dict[str, list[Sequence[int]]] = {}
    for entries in conds.values():
        for entry in entries:
            for name, shape in model.model.extra_conds_shapes(**entry).items():
                shapes.setdefault(name, []).append(shape)
                known = largest.get(name)
                if known is None or math.prod(shape) > math.prod(known[0]):
                    largest[name] = [shape]
    rest = list(noise_shape[1:])
    both = model.model.memory_required([noise_shape[0] * 2, *rest], cond_shapes=shapes)
    single = model.model.memory_required([noise_shape[0], *rest], cond_shapes=largest)
    return both, single


def prepare_sampling(
    model: Any,
    noise_shape: Sequence[int],
    conds: CondLists,
    model_options: dict[str, Any] | None = None,
) -> tuple[Any, CondLists, list[Any]]:
    """Load a patcher's model together with every model its conditioning needs.

    Wrappers of kind "prepare_sampling" run around it.

    Returns:
        (base model, conds, additional models loaded).
    """
    options = (model_options or {}).get("transformer_options", {})
    return run_wrapped(
        _prepare_sampling, None, "prepare_sampling", options,
        model, noise_shape, conds, model_options=model_options,
    )  # fmt: skip


def _prepare_sampling(
    model: Any,
    noise_shape: Sequence[int],
    conds: CondLists,
    model_options: dict[str, Any] | None = None,
) -> tuple[Any, CondLists, list[Any]]:
    run_beside(model, conds)
    models, inference = get_additional_models(conds, model.model_dtype())
    models += (model_options or {}).get("additional_models", [])
    models += model.get_nested_additional_models()
    needed, minimum = estimate_memory(model, noise_shape, conds)
    residency.load_models_gpu(
        [model, *models],
        memory_required=needed + inference,
        minimum_memory_required=minimum + inference,
    )
    return model.model, conds, models


def cast_to_load_options(
    model_options: dict[str, Any],
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Move patches, wrappers and callbacks that have a `to` method to a device and dtype."""
    targets = [target for target in (device, dtype) if target is not None]

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            for name in value:
                value[name] = moved(value[name])
        elif isinstance(value, list):
            value[:] = [moved(item) for item in value]
        elif hasattr(value, "to"):
            for target in targets:
                value = value.to(target)
        return value

    options = model_options.get("to_load_options")
    if options is not None and targets:
        moved(options)


def prepare_model_patcher(model: Any, conds: CondLists, model_options: dict[str, Any]) -> None:
    """Put the patcher's wrappers and callbacks into a run's options and register its hooks."""
    options = model_options.setdefault("transformer_options", {})
    wanted = model_options.setdefault("to_load_options", {})
    for name in ("wrappers", "callbacks"):
        options[name] = merge_nested_dicts(options.get(name, {}), getattr(model, name))
        wanted[name] = options[name]
    hooked.register_hooks(model, conds, model_options)


@contextmanager
def run_of(guider: Any) -> Iterator[None]:
    """Give a guider fresh lists and options of its own for one run; restore it afterwards."""
    patcher, original = guider.model_patcher, guider.model_options
    mode = patcher.hook_mode
    outer = None if patcher.hook_patches_backup is None else patcher.hook_patches
    guider.conds = {
        name: [dict(entry) for entry in entries] for name, entries in guider.original_conds.items()
    }
    hooked.share_control_hooks(guider.conds)
    options = guider.model_options = create_model_options_clone(original)
    try:
        patcher.hook_mode = hooked.mode_for(guider.conds, mode)
        prepare_model_patcher(patcher, guider.conds, options)
        hooked.drop_unregistered(guider.conds, options)
        yield
    finally:
        cast_to_load_options(options, device=patcher.offload_device)
        guider.model_options = original
        patcher.hook_mode = mode
        patcher.restore_hook_patches()
        if outer is not None:  # this was a step of another run on the same patcher
            patcher.hook_patches_backup, patcher.hook_patches = patcher.hook_patches, outer
        del guider.conds
