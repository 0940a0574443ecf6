"""Layers that stand in several base modules at once: of a shallow copy, or of a shared transformer.

Each base module has a physical state of its own, but a shared layer can show only one of them. The
one that is loaded takes the layer; the others put its weights back first, and load it again when
their turn comes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from comfy.patching.residence import RESIDENCES, Residence

_holders: weakref.WeakValueDictionary[int, Residence] = weakref.WeakValueDictionary()
"""The state that a layer shows, by the identity of its table of parameters: shallow copies of a
layer are other objects over the same tables."""


def take(state: Residence, modules: Iterable[nn.Module]) -> None:
    """Have no other base module's state shown by these layers."""
    tables = [id(module._parameters) for module in modules]
    others: dict[int, Residence] = {}
    for table in tables:
        holder = _holders.get(table)
        if holder is not state:
            if holder is not None:
                others[id(holder)] = holder
            _holders[table] = state
    for other in others.values():
        if other.model() is not None and other.give_up(set(tables)):
            for view in other.living_views()[:1]:
                view._publish_state()


def abandon(state: Residence) -> None:
    """Put back what a base module that is gone showed in layers that others have as well."""
    shared = {
        id(module._parameters)
        for other in list(RESIDENCES)
        if other is not state and other.model() is not None
        for _, module in other.modules()
    }
    state.put_layers_back(lambda module, _: id(module._parameters) in shared)


def own_modules(state: Residence) -> list[nn.Module]:
    """The layers of a base module but those that show another one's state."""
    modules = [module for _, module in state.modules()]
    holders = {id(m._parameters): _holders.get(id(m._parameters)) for m in modules}
    others = {id(h): h for h in holders.values() if h is not None and h is not state}
    taken = {
        id(module._parameters)
        for other in others.values()
        if other.model() is not None
        for _, module in other.modules()
        if holders.get(id(module._parameters)) is other
    }
    return [module for module in modules if id(module._parameters) not in taken]
