"""Patches of a weight that stays off the device, applied every time it is used."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling as compiling

from comfy.devices import casting
from comfy.weights import arithmetic
from comfy.weights.adapters import WeightAdapterBase
from comfy.weights.rounding import stochastic_rounding, string_to_seed

INTERMEDIATE_DTYPE = torch.float32
"""Type of weight arithmetic on every path, so that all of them give the same bits."""


class LowVramPatch:
    """Patches one weight at use, rounding as a resident weight is rounded.

    Args:
        key: State-dict key of the weight.
        patches: Patches by key; those of `key` are applied as they are at call time.
        convert_func: Decodes the stored weight, for layers that store it encoded.
        set_func: Encodes the patched weight again.
        keep: Keep the patches' tensors on the device between calls.
        calculate: Weight arithmetic of a patcher that brings its own.
        originals: key -> [(unpatched weight, convert)], for patches that are a difference to it.
        stays_decoded: Leave the patched weight as it was computed; its code is too coarse for it.
    """

    takes_stored = True
    """It sees weights as they are stored, before layers decode them."""

    def __init__(
        self,
        key: str,
        patches: Mapping[str, Sequence[Any]],
        convert_func: Callable[..., Any] | None = None,
        set_func: Callable[..., Any] | None = None,
        keep: bool = True,
        calculate: Callable[..., torch.Tensor] | None = None,
        originals: Mapping[str, Any] | None = None,
        stays_decoded: bool = False,
    ) -> None:
        self.key = key
        self.patches = patches
        self.convert_func = convert_func
        self.set_func = set_func
        self.keep = keep
        self.calculate = calculate
        self.originals = originals
        self.stays_decoded = stays_decoded
        self._local: tuple[torch.device, list[Any], list[Any]] | None = None

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The patched weight in the type it is stored in, or decoded; `weight` is not modified."""
        working = weight
        if self.convert_func is not None:
            working = self.convert_func(working, inplace=False)
        working = casting.cast_to(working, INTERMEDIATE_DTYPE, copy=True)
        patches = self._patches_on(weight.device)
        if self.originals is not None:
            patched = arithmetic.calculate_weight(
                patches, working, self.key, original_weights=self.originals
            )
        else:
            calculate = self.calculate or arithmetic.calculate_weight
            patched = calculate(patches, working, self.key)
        if self.stays_decoded:
            return patched
        seed = string_to_seed(self.key)
        if self.set_func is not None:
            return self.set_func(patched, seed=seed, return_weight=True)
        return stochastic_rounding(patched, weight.dtype, seed=seed)

    def grown_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the patched weight: adapters that add channels make it larger."""
        adapters = (patch[1] for patch in self.patches[self.key])
        grown = [a.calculate_shape(self.key) for a in adapters if isinstance(a, WeightAdapterBase)]
        return next((tuple(g) for g in reversed(grown) if g is not None), shape)

    @property
    def device_bytes(self) -> int:
        """Bytes of patches kept on a device."""
        local = self._local
        if local is None or local[0].type == "cpu":
            return 0
        return sum(patch_bytes(patch) for patch in local[2])

    def let_go(self) -> None:
        """Give up what is kept on a device; the next call brings it again."""
        self._local = None

    def _patches_on(self, device: torch.device) -> list[Any]:
        """The patches with their tensors on the device, moved once."""
        wanted = list(self.patches[self.key])
        if not self.keep:
            return [(p[0], move_patch_value(p[1], device), *p[2:]) for p in wanted]
        local = self._local
        same = local is not None and local[0] == device and len(local[1]) == len(wanted)
        if same and not compiling():  # compiled code cannot compare them, and is of one view
            same = all(a is b for a, b in zip(local[1], wanted))  # type: ignore[index]
        if not same:
            moved = [(p[0], move_patch_value(p[1], device), *p[2:]) for p in wanted]
            self._local = local = (device, wanted, moved)
        assert local is not None
        return local[2]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors of a patch's change."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, WeightAdapterBase):
        yield from tensors_in(value.weights)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def patch_bytes(patch: Sequence[Any]) -> int:
    """Bytes of the tensors of one recorded patch."""
    return sum(t.nbytes for t in tensors_in(patch[1]))


def move_patch_value(value: Any, device: torch.device) -> Any:
    """A patch's change with all its tensors on a device; other contents are kept."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, WeightAdapterBase):
        moved = copy.copy(value)
        moved.weights = move_patch_value(value.weights, device)
        return moved
    if isinstance(value, (tuple, list)):
        return type(value)(move_patch_value(item, device) for item in value)
    return value


def low_vram_patch_estimate_vram(model: Any, key: str) -> int:
    """Bytes the working copies of a streamed, patched weight take on the device at use."""
    from comfy.patching.attributes import owner_of

    owner, name = owner_of(model, key)
    weight = getattr(owner, name)
    if weight is None:
        return 0
    width = max(INTERMEDIATE_DTYPE.itemsize, weight.element_size())
    shape = getattr(owner, "decoded_shape", None) if name == "weight" else None
    return (weight.numel() if shape is None else math.prod(shape())) * width * 2


def decoding_bytes(module: Any) -> int:
    """Bytes that a layer's weight takes decoded, at use; 0 for a weight in no code."""
    shape = getattr(module, "decoded_shape", None)
    return 0 if shape is None else math.prod(shape()) * INTERMEDIATE_DTYPE.itemsize
