"""Reading and replacing what stands under a dotted name, with an exact way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


def get_attr(obj: Any, attr: str) -> Any:
    """The object under a dotted name.

    Raises:
        AttributeError: Part of the path does not exist.
    """
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


def find_attr(obj: Any, attr: str) -> Any:
    """The object under a dotted name, or None where part of the path does not exist."""
    for name in attr.split(".") if attr else ():
        obj = getattr(obj, name, None)
    return obj


def owner_of(obj: Any, attr: str) -> tuple[Any, str]:
    """(object that holds the last part of a dotted name, last part)."""
    path, _, name = attr.rpartition(".")
    return (get_attr(obj, path) if path else obj), name


def set_attr(obj: Any, attr: str, value: Any) -> Any:
    """Put `value` under a dotted name; returns what stood there."""
    owner, name = owner_of(obj, attr)
    previous = getattr(owner, name)
    if isinstance(owner, nn.Module) and name in owner._parameters and not _is_parameter(value):
        del owner._parameters[name]  # torch refuses a plain tensor in a parameter's place
    setattr(owner, name, value)
    return previous


def _is_parameter(value: Any) -> bool:
    return value is None or isinstance(value, nn.Parameter)


def set_attr_param(obj: Any, attr: str, value: torch.Tensor) -> Any:
    """Put a tensor under a dotted name as a parameter without gradient."""
    if isinstance(value, nn.Parameter):
        return set_attr(obj, attr, value)
    return set_attr(obj, attr, nn.Parameter(value, requires_grad=False))


def copy_to_param(obj: Any, attr: str, value: torch.Tensor) -> None:
    """Write a tensor's contents into the parameter under a dotted name."""
    get_attr(obj, attr).data.copy_(value)


class Swap(NamedTuple):
    """How to undo one replacement.

    Attributes:
        previous: What reading the name gave before.
        inherited: The object itself held nothing under the name (a class attribute or method).
    """

    previous: Any
    inherited: bool


def present_attr(obj: Any, attr: str) -> Swap:
    """What stands under a dotted name, for `undo_swap` after `set_attr` replaced it."""
    owner, name = owner_of(obj, attr)
    return Swap(getattr(owner, name), not _holds(owner, name))


def _holds(owner: Any, name: str) -> bool:
    """Whether an object itself has something under a name, not its class."""
    held = name in getattr(owner, "__dict__", {}) or name == "__class__"
    if isinstance(owner, nn.Module):
        held = held or any(
            name in table for table in (owner._parameters, owner._buffers, owner._modules)
        )
    return held


def undo_swap(obj: Any, attr: str, swap: Swap) -> None:
    """Put back what stood under a dotted name before; a second time changes nothing."""
    owner, name = owner_of(obj, attr)
    if not swap.inherited:
        set_attr(obj, attr, swap.previous)
    elif _holds(owner, name):
        delattr(owner, name)


def get_key_weight(
    model: Any, key: str
) -> tuple[torch.Tensor, Callable[..., Any] | None, Callable[..., Any] | None]:
    """A weight and, for layers that store it encoded, how to set and how to decode it.

    Returns:
        (weight, set_function, convert_function); the functions are `set_<name>` and
        `convert_<name>` of the layer, None where it has none.
    """
    owner, name = owner_of(model, key)
    set_function = getattr(owner, f"set_{name}", None)
    convert_function = getattr(owner, f"convert_{name}", None)
    weight = getattr(owner, name)
    if convert_function is not None:
        return weight, set_function, convert_function
    return weight, set_function, None


def is_of_code(model: Any, key: str) -> bool:
    """Whether a tensor belongs to the code of its layer's weight, and says nothing without it."""
    owner, name = owner_of(model, key)
    return name in (*getattr(owner, "part_names", ()), *getattr(owner, "note_names", ()))


def own_tensors(module: nn.Module) -> list[str]:
    """Names of the parameters and buffers a module holds itself."""
    names = [name for name, value in module._parameters.items() if value is not None]
    return names + [name for name, value in module._buffers.items() if value is not None]


ABSENT = object()
"""Saved in the place of an instance attribute that was not there."""


def restore_attribute(module: nn.Module, attribute: str, saved: Any) -> None:
    """Put an instance attribute back; one the instance did not have goes."""
    if saved is ABSENT:
        module.__dict__.pop(attribute, None)
    else:
        module.__dict__[attribute] = saved
