"""Objects of a base module that patches replaced, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from comfy.patching.attributes import Swap, get_attr, present_attr, set_attr, undo_swap


class SwappedObjects:
    """The part of a `Residence` that replaces objects of the module."""

    objects: dict[str, Swap]
    module: Callable[[], nn.Module]
    forget_below: Callable[[str], None]

    def shows_objects(self, objects: dict[str, Any]) -> bool:
        """Whether the module holds exactly these object patches now."""
        return self.objects.keys() == objects.keys() and all(
            get_attr(self.module(), name) is value for name, value in objects.items()
        )

    def swap_object(self, name: str, value: Any) -> None:
        """Replace an object of the model."""
        self._before_object_change(name)
        self.objects[name] = present_attr(self.module(), name)
        set_attr(self.module(), name, value)

    def put_objects_back(self) -> None:
        """Undo all object patches, last applied first."""
        while self.objects:
            name = next(reversed(self.objects))
            self._before_object_change(name)
            try:
                undo_swap(self.module(), name, self.objects[name])
            except (AttributeError, TypeError, ValueError, RuntimeError):
                del self.objects[name]  # what held it is gone: the others must still come back
                raise
            del self.objects[name]

    def _before_object_change(self, name: str) -> None:
        """A module about to be replaced must not take device copies along."""
        if isinstance(get_attr(self.module(), name), (nn.Module, torch.Tensor)):
            self.forget_below(name)
