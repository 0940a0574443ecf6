"""A weight on its way from a file to its layer: the bytes as stored, with the shape it has decoded.

What recognises families, renames keys and takes layers apart sees a float32 tensor of the right
shape. Taking or joining rows, copying and moving keep the code; any other arithmetic gets the
decoded numbers, which is right and takes more memory; changes in place are refused, for nothing
would hold them. A layer is given the bytes themselves
(`comfy.weights.encodings.encode_layers`), so no such tensor outlives the loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from comfy.ops.encoded import Encoding, Parts
from comfy.weights.low_bit.blocks import BlockCode

aten = torch.ops.aten


class StoredWeight(Tensor):
    """See the module.

    Attributes:
        stored: The bytes, often a file's.
        code: How they are decoded.
        parts: What else that takes, by name.
        notes: What only travels along.
    """

    stored: Tensor
    code: Encoding
    parts: Parts
    notes: Parts

    @staticmethod
    def __new__(
        cls,
        stored: Tensor,
        code: Encoding,
        shape: Sequence[int],
        parts: Parts | None = None,
        notes: Parts | None = None,
    ) -> StoredWeight:
        """A weight of a shape; decoded when anything but its place is asked for."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=torch.float32, device=stored.device, requires_grad=False
        )
        made.stored, made.code = stored, code
        made.parts, made.notes = dict(parts or {}), dict(notes or {})
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredWeight({tuple(self.shape)}, {getattr(self.code, 'name', self.code)})"

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as a plain tensor."""
        return self.code.decode(self.stored, self.parts, dtype)

    def rows(self, take: Callable[[Tensor], Tensor]) -> Tensor:
        """Some rows, taken by a function of a tensor ``[rows, ...]``; undecoded where possible."""
        if not isinstance(self.code, BlockCode) or not self.code.has_whole_rows:
            return take(self.decoded())
        taken = take(self.stored.reshape(self.shape[0], -1))
        code = self.code.rows(len(taken))
        return StoredWeight(taken, code, code.shape, self.parts, self.notes)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> StoredWeight:
        """The same weight with all its tensors copied or moved."""
        parts = {name: change(part) for name, part in self.parts.items()}
        return StoredWeight(change(self.stored), self.code, self.shape, parts, self.notes)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # of the form that torch calls
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        keep = KEEPING_THE_CODE.get(func)
        kept = None if keep is None else keep(*args, **kwargs)
        if kept is not None:
            return kept
        if func._schema.is_mutable:
            _refuse_stored(func, (*args[:1], kwargs.get("out")))
        args, kwargs = tree_map_only(StoredWeight, StoredWeight.decoded, (args, kwargs))
        return func(*args, **kwargs)


def _refuse_stored(func: Any, changed: Sequence[Any]) -> None:
    """TypeError where an operation would change the decoded copy of a weight, and so nothing."""
    for weight in changed:
        if isinstance(weight, StoredWeight):
            raise TypeError(
                f"{func} cannot change {weight!r} in place: its numbers are in a code; take "
                "decoded() and change that"
            )


def _slice(
    x: StoredWeight, axis: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor | None:
    return x.rows(lambda t: t[start:end:step]) if axis == 0 else None


def _split(x: StoredWeight, sizes: int | list[int], axis: int = 0) -> list[Tensor] | None:
    if axis != 0:
        return None
    if isinstance(sizes, int):
        sizes = [min(sizes, len(x) - start) for start in range(0, len(x), sizes)]
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [x.rows(lambda t, a=e - n, b=e: t[a:b]) for n, e in zip(sizes, ends)]  # type: ignore[misc]


def _index(x: StoredWeight, indices: list[Tensor | None]) -> Tensor | None:
    chosen = indices[0]
    if len(indices) != 1 or chosen is None or chosen.ndim != 1:
        return None
    return x.rows(lambda t: t[chosen])


def _join(tensors: list[Tensor], axis: int = 0) -> Tensor | None:
    first = tensors[0]
    if axis != 0 or not all(isinstance(t, StoredWeight) for t in tensors):
        return None
    kinds = {(t.code.name, t.shape[1:]) for t in tensors if isinstance(t.code, BlockCode)}  # type: ignore[attr-defined]
    if len(kinds) != 1 or not all(getattr(t.code, "has_whole_rows", False) for t in tensors):  # type: ignore[attr-defined]
        return None
    rows = [t.stored.reshape(len(t), -1) for t in tensors]  # type: ignore[attr-defined]
    code = first.code.rows(sum(map(len, tensors)))  # type: ignore[attr-defined]
    return StoredWeight(torch.cat(rows), code, code.shape)


def _moved(x: StoredWeight, **options: Any) -> Tensor | None:
    if options.get("dtype") not in (None, x.dtype):
        return None
    return x.with_tensors(lambda t: t.to(options.get("device") or t.device))


KEEPING_THE_CODE: dict[Any, Callable[..., Any]] = {
    aten.detach.default: lambda x: x.with_tensors(lambda t: t),
    aten.alias.default: lambda x: x.with_tensors(lambda t: t),
    aten.clone.default: lambda x, **_: x.with_tensors(torch.clone),
    aten._to_copy.default: _moved,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.index.Tensor: _index,
    aten.cat.default: _join,
}
"""Operation -> what it gives in the code; None where it needs the numbers."""
