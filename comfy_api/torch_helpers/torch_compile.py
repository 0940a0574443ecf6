"""Compiling parts of a diffusion model for the time a sampler uses it.

The model itself stays as it is: a wrapper around its application swaps the compiled parts in
before each call and the originals back in afterwards, so patches and saved weights never see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

APPLY_MODEL = "apply_model"  # the kind of wrapper around one application of the model
WRAPPER_KEY = "torch.compile"


class Patcher(Protocol):
    """What is needed of a model patcher."""

    def get_model_object(self, name: str) -> Any: ...

    def add_wrapper_with_key(self, wrapper_type: str, key: str, wrapper: Any) -> None: ...

    def remove_wrappers_with_key(self, wrapper_type: str, key: str) -> None: ...


def _set_at(root: Any, path: str, value: Any) -> None:
    """Assigns to a dotted attribute path; numbers are indices of module lists."""
    *parents, last = path.split(".")
    for name in parents:
        root = root[int(name)] if name.isdigit() else getattr(root, name)
    if last.isdigit():
        root[int(last)] = value
    else:
        setattr(root, last, value)


def apply_compiled(compiled: Mapping[str, Any]) -> Callable[..., Any]:
    """A wrapper that applies the model with some of its parts replaced."""

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        model = executor.class_obj
        originals = {key: _get_at(model, key) for key in compiled}
        try:
            for key, value in compiled.items():
                _set_at(model, key, value)
            return executor(*args, **kwargs)
        finally:
            for key, value in originals.items():
                _set_at(model, key, value)

    return wrapper


def _get_at(root: Any, path: str) -> Any:
    """Reads a dotted attribute path; numbers are indices of module lists."""
    for name in path.split("."):
        root = root[int(name)] if name.isdigit() else getattr(root, name)
    return root


def set_torch_compile_wrapper(
    model: Patcher,
    backend: str,
    options: Mapping[str, str] | None = None,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    keys: Sequence[str] = ("diffusion_model",),
    *args: Any,
    **kwargs: Any,
) -> None:
    """Lets a model run with compiled parts; called again, it replaces what it set before.

    Args:
        model: The model patcher; changed in place.
        backend, options, mode, fullgraph, dynamic: As `torch.compile` takes them.
        keys: Dotted names of the modules to compile.
        *args, **kwargs: Without effect; older callers pass them.
    """
    import torch

    del args, kwargs
    model.remove_wrappers_with_key(APPLY_MODEL, WRAPPER_KEY)
    compiled = {
        key: torch.compile(
            model.get_model_object(key),
            backend=backend,
            options=dict(options) if options is not None else None,
            mode=mode,
            fullgraph=fullgraph,
            dynamic=dynamic,
        )
        for key in keys
    }
    model.add_wrapper_with_key(APPLY_MODEL, WRAPPER_KEY, apply_compiled(compiled))
