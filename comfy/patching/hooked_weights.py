"""Weights that hooks show for the entry being evaluated, in the place of those a view shows."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn


class HookedWeights:
    """The part of a `Residence` that puts weights of hooks in place and takes them off."""

    hooked: dict[str, torch.Tensor]
    hook_functions: dict[tuple[str, str], list[Any]]
    living_views: Callable[[], list[Any]]
    _submodule: Callable[[str], nn.Module | None]
    _table: Callable[[nn.Module, str], dict[str, Any]]

    def show_hooked(self, module: nn.Module, prefix: str, name: str, tensor: torch.Tensor) -> None:
        """Register a hook's weight in the place of the one the view shows."""
        table = self._table(module, name)
        shown = table[name]
        assert shown is not None, f"{prefix}{name} holds no tensor"
        self.hooked.setdefault(prefix + name, shown)
        if table is module._parameters and not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        table[name] = tensor

    def add_hook_function(self, module: nn.Module, prefix: str, name: str, function: Any) -> None:
        """Append a hook's function to those a streamed module applies at use."""
        attribute = f"{name}_function"
        present = getattr(module, attribute)
        self.hook_functions.setdefault((prefix, attribute), present)
        module.__dict__[attribute] = [*present, function]

    def hooked_keys(self) -> set[str]:
        """Keys of the weights that hooks change now."""
        functions = (
            prefix + name.removesuffix("_function") for prefix, name in self.hook_functions
        )
        return {*self.hooked, *functions}

    def take_hooks_off(self, keys: Container[str] | None = None) -> None:
        """Put back what hooks replaced; nothing can fail here.

        Args:
            keys: Only these weights; None means all, and then no view shows any hooks.
        """
        if keys is None:
            self.show_hooks_of_none()
        for key in [key for key in self.hooked_keys() if keys is None or key in keys]:
            self.take_hook_off(key)

    def take_hook_off(self, key: str) -> None:
        """Put back what hooks replaced of one weight; what is not there yet can be asked again."""
        path, _, name = key.rpartition(".")
        shown = self.hooked.get(key)
        functions_key = (f"{path}." if path else "", f"{name}_function")
        functions = self.hook_functions.get(functions_key)
        module = self._submodule(path) if shown is not None or functions is not None else None
        if module is not None and shown is not None:
            self._table(module, name)[name] = shown
        if module is not None and functions is not None:
            module.__dict__[functions_key[1]] = functions
        self.hooked.pop(key, None)
        self.hook_functions.pop(functions_key, None)

    def show_hooks_of_none(self) -> None:
        """Note that no view's hooks are shown: each has to show its own again."""
        for view in self.living_views():
            view.current_hooks = None

    def forget_hook_weights(self) -> None:
        """Let go of the weights that any view keeps for its next switch of hooks."""
        for view in self.living_views():
            view.clear_cached_hook_weights()
