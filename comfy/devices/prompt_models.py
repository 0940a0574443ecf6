"""Which models a prompt really references: what flows along its links, not what nodes could load.

The executor reports every value that passes a link, cached ones and those of run-time subgraphs
included. The planner lets models of the running prompt go last, and `models()` tells what to keep.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CONTAINERS = (list, tuple, set)


class PromptModelTracker:
    """The base modules that values of one prompt hold; it keeps none of them alive."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[Any] = weakref.WeakSet()

    def start(self) -> None:
        """Forget the last prompt's models."""
        self._modules.clear()

    def add(self, value: Any) -> None:
        """Note the models in a value on a link: patchers, and objects that carry one.

        Args:
            value: Any node output; lists and dicts are looked into one level deep.
        """
        inner = value.values() if isinstance(value, dict) else value
        for item in inner if isinstance(value, (dict, *CONTAINERS)) else (value,):
            patcher: Any = getattr(item, "patcher", item)
            if hasattr(patcher, "model_patches_to") and hasattr(patcher, "model"):
                self._modules.add(patcher.model)
                for other in patcher.get_nested_additional_models():
                    self._modules.add(other.model)

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
        for entry in list(residency.current_loaded_models):
            entry.currently_used = False


PROMPT_MODELS = PromptModelTracker()
"""The tracker of the running prompt: there is one worker thread."""
