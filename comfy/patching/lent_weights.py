"""Patched weights in the memory of their originals, as part of a base module's physical state.

What stands in the layer is a parameter of its own over that memory, as patched weights beside their
originals have one; the original comes back as the same object with the same bytes. An original
lends its memory only while nobody but its layer holds it, so nobody sees it change; and whoever
took the patched weight keeps it: the original then gets new memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from comfy.weights.lending import LentWeight, lent_weight
from comfy.weights.pages import WeightMemory


class LentBackup:
    """The record of a weight that lends its memory, read like a `Backup`.

    The original is only made when it is asked for, and from then on has memory of its own.
    """

    inplace_update = False

    def __init__(self, lent: LentWeight) -> None:
        self._lent = lent

    @property
    def weight(self) -> torch.Tensor:
        """The original."""
        return self._lent.whole()

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Any]:
        return iter((self.weight, self.inplace_update))

    def __getitem__(self, index: Any) -> Any:
        return (self.weight, self.inplace_update)[index]


class LentWeights:
    """The part of a `Residence` that has originals lend their memory."""

    lent: dict[str, LentWeight]
    home: dict[str, torch.Tensor]
    held: dict[str, Any]
    pinned: dict[str, Any]
    backup: dict[str, Any]
    memory: WeightMemory
    _paths: Callable[[nn.Module, str, str], list[str]]

    def lending(self, key: str) -> LentWeight | None:
        """The weight under a key, if it lends its memory now."""
        lent = self.lent.get(key)
        return lent if lent is not None and lent.is_lent else None

    def unpatched(self, key: str) -> torch.Tensor:
        """The original of a replaced weight; one that lends its memory gets new one."""
        lent = self.lending(key)
        return self.home[key] if lent is None else lent.whole()

    def plain_copy(self, key: str, original: torch.Tensor) -> torch.Tensor:
        """A deep copy of a replaced parameter or buffer."""
        lent = self.lending(key)
        if lent is None or lent.weight is not original:
            return copy.deepcopy(original)
        return nn.Parameter(lent.copy(), requires_grad=original.requires_grad)

    def lend(self, module: nn.Module, prefix: str, name: str, patches: Sequence[Any]) -> bool:
        """Show the patched form of a weight that lends its memory, or now begins to.

        Returns:
            False when it does not; it may then have been put back.
        """
        key, table = prefix + name, module._parameters
        lent = self.lending(key)
        if lent is not None:
            self._withdraw(lent, module, prefix, name)
            if not lent.can_write():
                return False
        elif key in self.home or key in self.backup or table.get(name) is None:
            return False
        else:
            lent = lent_weight(table, name, key, self.memory)
        if lent is None:
            return False
        self.lent[key] = lent
        self.home[key] = lent.weight
        self._paths(module, name, prefix)
        shown = nn.Parameter(lent.weight.detach(), requires_grad=False)
        table[name] = shown
        if not lent.patch(patches):
            return False
        self.backup[key] = LentBackup(lent)
        return True

    def _withdraw(self, lent: LentWeight, module: nn.Module, prefix: str, name: str) -> None:
        """Let the original stand in its place again, whatever it holds."""
        self.held.pop(prefix + name, None)
        self.pinned.pop(prefix + name, None)
        module._parameters[name] = lent.weight  # type: ignore[assignment]

    def _end_lending(self, module: nn.Module, prefix: str, name: str) -> None:
        """Make an original whole in its place; nothing happens when it does not lend its memory."""
        lent = self.lending(prefix + name)
        if lent is not None:
            self._withdraw(lent, module, prefix, name)
            if lent.can_write():
                lent.take_back()
            else:
                lent.whole()
        self.lent.pop(prefix + name, None)
