"""Which weights changes are recorded for, told without listing all keys of the model each time."""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

EXTRA_STATE = "_extra_state"  # torch's key for what a module adds by `get_extra_state`


class StateDictKeys(Container[str]):
    """The keys of a module's state dict, listed only where its modules do not tell.

    Some packs record one change a call: listing the keys each time would take them time that
    grows with the square of the number of weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __contains__(self, key: object) -> bool:
        told = is_listed(self.model, key) if isinstance(key, str) else None
        return key in self._listed if told is None else told

    @functools.cached_property
    def _listed(self) -> Container[object]:
        return self.model.state_dict(keep_vars=True).keys()


def is_listed(model: nn.Module, key: str) -> bool | None:
    """Whether a key is in the state dict; None where a module on its way lists keys in its own way,
    or torch's way is not followed from there.
    """
    *path, name = key.split(".")
    module: Any = model
    for part in path:
        if not _lists_as_torch_does(module):
            return None
        module = module._modules.get(part)
        if module is None:
            return False
    if not _lists_as_torch_does(module) or name == EXTRA_STATE:
        return None
    if module._parameters.get(name) is not None:
        return True
    is_kept = name not in module._non_persistent_buffers_set
    return is_kept and module._buffers.get(name) is not None


def _lists_as_torch_does(module: Any) -> bool:
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        return False
    kind, own = type(module), module.__dict__
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and "state_dict" not in own
        and "_save_to_state_dict" not in own
        and not module._state_dict_hooks
        and not module._state_dict_pre_hooks
    )


def record(
    table: dict[str, list[Any]],
    patches: Mapping[Any, Any],
    strengths: tuple[float, float],
    known: Container[str],
) -> list[Any]:
    """Put changes into a table: key -> [(strength, change, strength of the weight, offset,
    function), ...].

    Args:
        patches: key -> change; a key may be (key, offset) or (key, offset, function).
        strengths: Multipliers of the changes and of the weights.
        known: Keys of the model; changes of others are left out.
    Returns:
        The keys of what was recorded, as given.
    """
    strength_patch, strength_model = strengths
    taken = []
    for full_key, change in patches.items():
        parts = (full_key,) if isinstance(full_key, str) else tuple(full_key)
        key, offset, function = (*parts, None, None)[:3]
        if key in known:
            patch = (strength_patch, change, strength_model, offset, function)
            table.setdefault(key, []).append(patch)
            taken.append(full_key)
    return taken
