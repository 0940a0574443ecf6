"""What a base module's physical state takes on its device and in page-locked memory, in bytes.

The server's thread asks while the worker loads, so every table is read as a copy of its values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from comfy.devices import accelerators
from comfy.devices.pinning import Pinned
from comfy.ops.streaming import StreamPlan


class HeldWeight(NamedTuple):
    """A weight of a resident module.

    Attributes:
        tensor: What was registered; code outside may have moved its contents since.
        size: Bytes it takes on the device; 0 for the twin of a tied weight counted elsewhere.
    """

    tensor: torch.Tensor
    size: int


class Occupancy:
    """The part of a `Residence` that counts bytes."""

    held: dict[str, HeldWeight]
    streaming: dict[str, dict[str, Any]]
    hooked: dict[str, torch.Tensor]
    pinned: dict[str, Pinned]
    plan: StreamPlan | None
    device: torch.device | None
    views: weakref.WeakValueDictionary[int, Any]
    _submodule: Callable[[str], nn.Module | None]
    _table: Callable[[nn.Module, str], Mapping[str, Any]]

    def living_views(self) -> list[Any]:
        """The patchers of the module that somebody still holds."""
        return [view for ref in self.views.valuerefs() if (view := ref()) is not None]

    @property
    def loaded_bytes(self) -> int:
        """Bytes of weights on the load device.

        Custom nodes that swap blocks move weights off the device on their own; these do not count.
        """
        kept = self.plan.held_bytes if self.plan is not None else 0
        here, anywhere = self.device, self.device is None
        held = list(self.held.values())
        return sum(h.size for h in held if anywhere or h.tensor.device == here) + kept

    def loaded_on(self, device: torch.device | None) -> int:
        """Bytes of weights on a device: none where the module is loaded on another one."""
        wanted = None if device is None else accelerators.with_index(device)
        return self.loaded_bytes if self.device == wanted else 0

    def module_bytes(self, name: str, params: Iterable[str]) -> int:
        """Bytes one module holds on the load device."""
        prefix = f"{name}." if name else ""
        found = (self.held.get(prefix + param) for param in params)
        return sum(h.size for h in found if h is not None and h.tensor.device == self.device)

    @property
    def device_bytes(self) -> int:
        """Bytes on the load device: weights, copies under way, patches, weights of hooks."""
        return self.loaded_bytes + self.patch_bytes + self.hook_bytes + self.ahead_bytes

    @property
    def ahead_bytes(self) -> int:
        """Bytes of streamed weights that travelled before their turn."""
        plan = self.plan
        return plan.ahead_bytes if plan is not None else 0

    @property
    def hook_bytes(self) -> int:
        """Bytes on the load device of weights computed for hooks: shown ones and kept ones."""
        if self.device is None or self.device.type == "cpu":
            return 0
        tensors = [t for view in self.living_views() for t in view.cached_hook_weights()]
        tensors += [t for key in list(self.hooked) if (t := self._registered(key)) is not None]
        sizes = {t.data_ptr(): t.nbytes for t in tensors if t.device == self.device}
        return sum(sizes.values())

    def _registered(self, key: str) -> torch.Tensor | None:
        """The parameter or buffer that stands under a key now."""
        path, _, name = key.rpartition(".")
        module = self._submodule(path)
        return None if module is None else self._table(module, name).get(name)

    @property
    def patch_bytes(self) -> int:
        """Bytes of patches on the load device, kept there for weights that are patched at use."""
        return sum(getattr(f, "device_bytes", 0) for f in self.functions())

    def functions(self) -> Iterator[Any]:
        """What streamed modules apply to their weights and biases at use."""
        for path in list(self.streaming):
            module = self._submodule(path)
            for name in ("weight_function", "bias_function"):
                yield from getattr(module, name, ())

    @property
    def pinned_bytes(self) -> int:
        """Bytes of page-locked host memory held for streaming."""
        return sum(pinned.size for pinned in list(self.pinned.values()))
