"""Which base module a patcher is a view of, and copies of the patcher with modules of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from comfy.patching import attributes
from comfy.patching.injections import Injections
from comfy.patching.residence import Residence, residence_of

_SHARED_CONSTANTS = {id(None), id(True), id(False)}
"""Objects that stand in many places, so that a copy must not replace them everywhere."""


class OnBaseModule(Injections):
    """The part of a patcher that knows its module."""

    residence: Residence
    size: int
    parent: Any
    _model: Any
    current_hooks: Any
    clear_cached_hook_weights: Callable[[], None]
    _publish_state: Callable[[], None]
    _take_shared_modules: Callable[[], None]

    @property
    def model(self) -> Any:
        """The base module; custom nodes may put another one, or None, in its place."""
        return self._model

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        left = self.__dict__.get("residence")
        if left is not None and self._model is not model:
            left.views.pop(id(self), None)
            self.size = 0
            if not left.living_views() and left.model() is not None:
                left.restore()  # nobody else would take the weights off the device
        self._model = model
        self.residence = residence_of(model)
        self.residence.views[id(self)] = self

    @model.deleter
    def model(self) -> None:
        self.model = None

    def _copied_model(self) -> nn.Module:
        """A deep copy of the base module with plain weights, whatever is loaded now."""
        self._take_shared_modules()
        state = self.residence
        memo: dict[int, Any] = {}
        for key, home in [*state.hooked.items(), *state.home.items()]:
            memo[id(attributes.find_attr(self.model, key))] = state.plain_copy(key, home)
        for name, saved in state.streaming.items():
            layer = attributes.find_attr(self.model, name)
            if layer is not None:
                memo |= {id(layer.__dict__.get(attribute)): None for attribute in saved}
        memo = {key: value for key, value in memo.items() if key not in _SHARED_CONSTANTS}
        with self.use_ejected():
            copied = copy.deepcopy(self.model, memo)
        for name, saved in state.streaming.items():
            layer = attributes.find_attr(copied, name)
            for attribute, value in saved.items() if layer is not None else ():
                attributes.restore_attribute(layer, attribute, value)
        return copied

    def __copy__(self) -> Any:
        """Another patcher with the same tables, of the same module."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        self.residence.views[id(copied)] = copied
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A patcher of a module of its own; its parent stays the same."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        model = memo.get(id(self.model))
        if model is None:
            model = memo[id(self.model)] = self._copied_model()
        state = residence_of(model)
        own = {"_model": model, "residence": state, "parent": self.parent, "current_hooks": None}
        for name, value in self.__dict__.items():
            copied.__dict__[name] = own[name] if name in own else copy.deepcopy(value, memo)
        copied._start_anew()
        return copied

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the view, and its module with plain weights."""
        state = {**self.__dict__, "_model": self._copied_model(), "parent": None}
        del state["residence"]
        return {**state, "current_hooks": None, "cached_hook_patches": {}, "_cached_strengths": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.residence = residence_of(self._model)
        self._start_anew()

    def _start_anew(self) -> None:
        """After the module became a fresh copy: nothing is loaded, injected or computed."""
        self.clear_cached_hook_weights()
        self.is_injected = False
        self.residence.views[id(self)] = self
        self._publish_state()
