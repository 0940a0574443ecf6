"""Which models a prompt really references: what flows along its links, not what nodes could load.

The executor reports every value that passes a link, cached ones and those of run-time subgraphs
included. The planner lets models of the running prompt go last, and `models()` tells what to keep.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CONTAINERS = (list, tuple, set)


CONDITIONING_DEPTH = 3
"""A conditioning is a list of pairs with a dict of options."""

MOST_VALUES = 1000
"""Lists are no longer opened once this many values were found: they hold other things."""

PLAIN = (type(None), bool, int, float, str, bytes)


def patchers_of(item: Any) -> list[Any]:
    """The patchers a value is or carries: a model, text encoder, autoencoder, guider, ControlNet.

    Custom nodes bring patchers and control networks of their own, which answer only some questions.
    """
    carried = [getattr(item, name, None) for name in ("patcher", "model_patcher")]
    found = [p for p in (item, *carried) if _is_patcher(p)]
    ask = getattr(item, "get_models", None) if not found else None
    if ask is not None and hasattr(item, "get_control"):
        found += [p for p in ask() if _is_patcher(p)]
    for patcher in list(found):
        nested = getattr(patcher, "get_nested_additional_models", list)
        found += [p for p in nested() if _is_patcher(p)]
    return found


def _is_patcher(item: Any) -> bool:
    return hasattr(item, "model_patches_to") and getattr(item, "model", None) is not None


class PromptModelTracker:
    """The base modules that values of one prompt hold; it keeps none of them alive."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_running = False

    def start(self) -> None:
        """Forget the last prompt's models."""
        self._modules.clear()
        self.is_running = True

    def add(self, value: Any) -> None:
        """Note the models in a value on a link: patchers, and objects that carry some.

        Args:
            value: Any node output; lists and dicts are looked into, as deep as conditioning nests
                them.
        """
        waiting = [(value, 0)]
        for item, depth in waiting:
            if isinstance(item, (dict, *CONTAINERS)):
                inner = item.values() if isinstance(item, dict) else item
                if depth < CONDITIONING_DEPTH and len(waiting) < MOST_VALUES:
                    waiting += [(part, depth + 1) for part in inner]
            elif type(item) not in PLAIN:
                for patcher in patchers_of(item):
                    self._modules.add(patcher.model)

    def references(self, model: Any) -> bool:
        """Whether the prompt has seen a view of this base module."""
        return model is not None and model in self._modules

    def models(self) -> list[Any]:
        """The base modules seen so far that still live."""
        return list(self._modules)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Tracks one prompt while the block runs."""
        self.start()
        try:
            yield
        finally:
            self.end()

    def end(self) -> None:
        """The prompt is over: its models have no claim any more, and none is in use."""
        from comfy.devices import residency  # which imports this module

        self._modules.clear()
        self.is_running = False
        for entry in list(residency.current_loaded_models):
            if entry.currently_used:
                entry.last_used_s = time.monotonic()  # idle from now on, however long it ran
            entry.currently_used = False


PROMPT_MODELS = PromptModelTracker()
"""The tracker of the running prompt: there is one worker thread."""
