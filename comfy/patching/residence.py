"""The physical state of one base module: which weights were replaced, and the way back.

All views (patchers) of a module share one `Residence`. Every weight that is moved or patched is a
new parameter registered in the place of the original; the original object is kept, and undoing
anything is re-registering it. Originals are not written to, so nothing can fail then, but those
whose contents can be had from their file again: see `lent_weights`.
A file-backed original costs no memory while its device copy is in use, because its pages can go.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from comfy.devices.memory import tensor_bytes
from comfy.devices.pinning import Pinned
from comfy.ops.streaming import StreamPlan
from comfy.patching.attributes import (
    Swap,
    copy_to_param,
    own_tensors,
    set_attr_param,
)
from comfy.patching.hooked_weights import HookedWeights
from comfy.patching.lent_weights import LentWeights
from comfy.patching.occupancy import HeldWeight, Occupancy
from comfy.patching.streamed_layers import StreamedLayers
from comfy.patching.swapped_objects import SwappedObjects
from comfy.weights.lending import LentWeight
from comfy.weights.mapped_file import release_pages
from comfy.weights.pages import WeightMemory

logger = logging.getLogger(__name__)


class Backup(NamedTuple):
    """A weight as it was before it was patched.

    Attributes:
        weight: The original.
        inplace_update: The patched values were written into the parameter itself.
    """

    weight: torch.Tensor
    inplace_update: bool


@dataclass(eq=False)
class Residence(HookedWeights, LentWeights, StreamedLayers, SwappedObjects, Occupancy):
    """What was done to a base module.

    Attributes:
        model: Weak reference to the module.
        backup: Originals of patched weights, by key; public, subclasses of the patcher write to it.
        home: Original parameters and buffers of every weight replaced by a copy or a patched one.
        lent: Originals whose memory the patched weight in their place has, by key.
        paths: Prefixes of the keys a weight was replaced under, by layer and name.
        applied: Patches materialised in a replaced weight, by key.
        held: Weights of resident modules, by key.
        resident: Names of resident modules.
        streaming: Instance attributes to put back on each streamed module, by module name.
        streamed: The streamed modules, by name.
        copies: Device copies by the identity of their original, for weights that are tied.
        pinned: Page-locked memory of streamed weights, by key.
        injected: (patcher, injection) that is in effect, in order.
        objects: Undo records of object patches, by dotted name, in order of application.
        plan: Transfers of the streamed modules.
        hooked: Weights that hooks replaced for the entry being evaluated, by key.
        hook_functions: Weight functions of streamed modules before hooks added theirs.
        device: Where resident weights are; None when nothing was ever loaded.
        uuid: `patches_uuid` of the view whose patches the weights show; None for plain weights.
        views: Living patchers of the module, by id.
        moved_bytes: Bytes of weights that loading wrote, to devices or in place of others.
        published: What was last shown of this under public attribute names of the module.
        memory: Where patched weights on the CPU are put.
    """

    model: Callable[[], Any]
    backup: dict[str, Any] = field(default_factory=dict)
    home: dict[str, torch.Tensor] = field(default_factory=dict)
    lent: dict[str, LentWeight] = field(default_factory=dict)
    paths: weakref.WeakKeyDictionary[nn.Module, dict[str, list[str]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    applied: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    held: dict[str, HeldWeight] = field(default_factory=dict)
    resident: set[str] = field(default_factory=set)
    streaming: dict[str, dict[str, Any]] = field(default_factory=dict)
    streamed: weakref.WeakValueDictionary[str, nn.Module] = field(
        default_factory=weakref.WeakValueDictionary
    )
    hooked: dict[str, torch.Tensor] = field(default_factory=dict)
    hook_functions: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    objects: dict[str, Swap] = field(default_factory=dict)
    copies: dict[int, torch.Tensor] = field(default_factory=dict)
    pinned: dict[str, Pinned] = field(default_factory=dict)
    injected: list[tuple[Any, Any]] = field(default_factory=list)
    plan: StreamPlan | None = None
    device: torch.device | None = None
    uuid: Any = None
    views: weakref.WeakValueDictionary[int, Any] = field(
        default_factory=weakref.WeakValueDictionary
    )
    published: dict[str, Any] = field(default_factory=dict)
    memory: WeightMemory = field(default_factory=WeightMemory)
    moved_bytes: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Residence:
        """Copies of a module start without a history; see `ModelPatcher.clone`."""
        copied = memo.get(id(self.module()))
        return Residence(weakref.ref(self.module() if copied is None else copied))

    def __reduce__(self) -> tuple[Any, ...]:
        """A module that is pickled leaves its history behind."""
        return (type(None), ())

    def __del__(self) -> None:
        """The module is gone; layers of it that others have too must not keep what it showed."""
        if (self.home or self.streaming) and not sys.is_finalizing():
            from comfy.patching import sharing  # which imports this module

            sharing.abandon(self)

    def module(self) -> nn.Module:
        """The base module; it lives as long as any patcher of it."""
        model: nn.Module | None = self.model()
        if model is None:
            raise ReferenceError("the base module was freed while its state was in use")
        return model

    # -- weights ---------------------------------------------------------------------------

    def original(self, module: nn.Module, prefix: str, name: str) -> torch.Tensor | None:
        """The unreplaced parameter or buffer of a module; `unpatched` has its contents, too."""
        key = prefix + name
        if key in self.home:
            return self.home[key]
        if key in self.hooked:
            return self.hooked[key]
        current = module._parameters.get(name)
        return module._buffers.get(name) if current is None else current

    @staticmethod
    def _table(module: nn.Module, name: str) -> dict[str, Any]:
        """The module's table that holds a tensor: parameters or buffers."""
        return module._parameters if name in module._parameters else module._buffers

    def replace(self, module: nn.Module, prefix: str, name: str, tensor: torch.Tensor) -> None:
        """Register `tensor` in the place of a weight, keeping the original for the way back."""
        key = prefix + name
        table = self._table(module, name)
        current = table[name]
        assert current is not None, f"{key} holds no tensor"
        backup = None if key in self.home else self.backup.get(key)
        if backup is not None and not backup.inplace_update:
            current = backup.weight  # a subclass of the patcher wrote its patched weight here
        home = self.home.setdefault(key, current)
        self._paths(module, name, prefix)
        self.pinned.pop(key, None)
        if self.copies.get(id(home)) is not tensor:
            self.copies.pop(id(home), None)
        if table is module._parameters and not isinstance(tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        table[name] = tensor

    def move(self, module: nn.Module, prefix: str, name: str, device: torch.device) -> int:
        """Put a plain copy of a weight's original on a device.

        Returns:
            Bytes newly taken there: 0 when the original lives there or a twin was copied before.
        """
        if self.lending(prefix + name) is not None:
            self.put_back(module, prefix, name)
        home = self.original(module, prefix, name)
        if home is None:
            return 0
        if home.device == device:
            self.put_back(module, prefix, name)
            return tensor_bytes(home)
        copy = self.copies.get(id(home))
        taken = 0
        if copy is None or copy.device != device:
            copy = home.detach().to(device)
            release_pages(home)
            if isinstance(home, nn.Parameter):
                copy = nn.Parameter(copy, requires_grad=False)
            taken = tensor_bytes(home)
            self.moved_bytes += taken
        self.replace(module, prefix, name, copy)
        self.copies[id(home)] = copy
        self.applied.pop(prefix + name, None)
        self.backup.pop(prefix + name, None)
        return taken

    def put_back(self, module: nn.Module, prefix: str, name: str) -> None:
        """Re-register a weight's original; nothing happens when it was never replaced.

        Where several paths lead to the layer, it may have been replaced under several keys, one on
        top of the other: then all of that goes, the last first.
        """
        for path in reversed(self._paths(module, name, prefix)):
            self._put_one_back(module, path, name)
        self.paths.get(module, {}).pop(name, None)

    def _paths(self, module: nn.Module, name: str, prefix: str) -> list[str]:
        """Prefixes under which a weight was replaced, in order; `prefix` is one in any case."""
        paths = self.paths.setdefault(module, {}).setdefault(name, [])
        if prefix not in paths:
            paths.append(prefix)
        return paths

    def _put_one_back(self, module: nn.Module, prefix: str, name: str) -> None:
        key = prefix + name
        self._end_lending(module, prefix, name)
        home, backup = self.home.get(key), self.backup.get(key)
        if home is not None:
            tables: list[dict[str, Any]] = [module._parameters, module._buffers]
            own, other = tables if isinstance(home, nn.Parameter) else tables[::-1]
            other.pop(name, None)  # where a subclass of the patcher made a parameter of a buffer
            own[name] = home
        if backup is not None and (home is None or backup.inplace_update):
            self._undo_foreign(key, backup)
        # Only now: a cancellation from outside can end this at any point, and is not to lose one.
        for table in (self.applied, self.held, self.pinned, self.backup, self.home):
            table.pop(key, None)
        self.copies.pop(id(home), None)

    def keep_original(
        self, module: nn.Module, prefix: str, name: str, original: torch.Tensor | None
    ) -> None:
        """Note what stood in a weight's place before a patcher's subclass put its own there."""
        current = self._table(module, name).get(name)
        if original is not None and current is not original:
            self._paths(module, name, prefix)
            self.home.setdefault(prefix + name, original)

    def _undo_foreign(self, key: str, backup: Any) -> None:
        """Undo a change recorded only in `backup`: in place, or by a patcher's subclass."""
        model = self.module()
        if backup.inplace_update:
            copy_to_param(model, key, backup.weight)
        else:
            set_attr_param(model, key, backup.weight)

    # -- whole modules ---------------------------------------------------------------------

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """(name, module) for every module that holds weights of its own."""
        for name, module in self.module().named_modules():
            if any(True for _ in own_tensors(module)):
                yield name, module

    def forget_below(self, name: str) -> None:
        """Put everything under a dotted name back, before what stands there changes."""
        owner = name.rpartition(".")[0]
        for module_name, module in list(self.modules()):
            inside = module_name == name or module_name.startswith(f"{name}.")
            if inside or (module_name == owner and name in self.home):
                self.release(module_name, module)

    def release(self, name: str, module: nn.Module) -> None:
        """Put a module's weights and attributes back."""
        prefix = f"{name}." if name else ""
        for tensor_name in own_tensors(module):
            self.put_back(module, prefix, tensor_name)
        self.stop_streaming(name, module)
        self.resident.discard(name)

    def give_up(self, tables: Container[int]) -> bool:
        """Put the layers back that another base module has as well, and now loads.

        Args:
            tables: Identities of the layers' tables of parameters.
        Returns:
            Whether there were any.
        """
        if not (self.home or self.backup or self.streaming or self.held):
            return False
        self.part_with_layers()
        shared = [(n, m) for n, m in self.modules() if id(m._parameters) in tables]
        if shared:
            self.take_hooks_off()
            self.uuid = None
        if shared and self.plan is not None:
            self.plan.forget_order()
        for name, module in shared:
            if self.plan is not None:
                self.plan.drop(id(module))
            self.release(name, module)
        for key in reversed([*self.home, *self.backup]):  # those known by a second path
            path, _, name = key.rpartition(".")
            owner = self._submodule(path)
            if owner is not None and id(owner._parameters) in tables:
                self.put_back(owner, f"{path}." if path else "", name)
        return bool(shared)

    def restore(self) -> None:
        """Put every weight and attribute back; the module is then exactly as it was."""
        self.uuid = None  # what is stopped on the way is taken up by the next call
        self.take_hooks_off()
        self.forget_hook_weights()
        self.close_plan()
        self.put_layers_back(lambda *_: True)
        for key in reversed([*self.home, *self.backup, *self.lent]):  # known by their path alone
            path, _, name = key.rpartition(".")
            module = self._submodule(path)
            if module is not None:
                self.put_back(module, f"{path}." if path else "", name)
        for table in (self.home, self.backup, self.copies, self.applied, self.held, self.pinned,
                      self.resident, self.streaming, self.lent):  # fmt: skip
            table.clear()

    def put_layers_back(self, chosen: Callable[[nn.Module, str], bool]) -> None:
        """Put weights and attributes back wherever their layers are now.

        Args:
            chosen: Tells of a layer and its former path whether it is meant.
        """
        for module, names in list(self.paths.items()):
            for name, prefixes in list(names.items()):
                if prefixes and chosen(module, prefixes[-1].removesuffix(".")):
                    self.put_back(module, prefixes[-1], name)
        for path, module in list(self.streamed.items()):
            if chosen(module, path):
                self.stop_streaming(path, module)
                self.resident.discard(path)

    def part_with_layers(self) -> None:
        """Put back layers in whose place code outside has put others without an object patch."""
        present = dict(self.module().named_modules(remove_duplicate=False))
        self.put_layers_back(lambda module, path: present.get(path) is not module)

    def _submodule(self, path: str) -> nn.Module | None:
        try:
            return self.module().get_submodule(path)
        except AttributeError:  # replaced behind our back by code that did not use object patches
            logger.warning("module '%s' vanished while its weights were loaded", path)
            return None


_PLACE = "_latentloom_residence"

RESIDENCES: weakref.WeakSet[Residence] = weakref.WeakSet()
"""The states of all living base modules."""


def _no_module() -> None:
    """What the reference of a patcher without a module gives."""


def residence_of(model: Any) -> Residence:
    """The one physical state of a base module; an empty one for None.

    It is kept in the module itself. A table of weak keys would keep modules alive for ever: what an
    object patch replaced may be a bound method of the module, and an injection holds its patcher.
    """
    if model is None:
        return Residence(_no_module)
    found = model.__dict__.get(_PLACE)
    if found is None or found.model() is not model:
        found = model.__dict__[_PLACE] = Residence(weakref.ref(model))
        RESIDENCES.add(found)
    return found
