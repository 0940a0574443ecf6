"""Several latents that are sampled together although their shapes differ (video with audio).

A `NestedTensor` is a thin list of tensors that answers the tensor questions graph code asks.
`pack` flattens one into a single [B, 1, N] latent for the solver and `unpack` restores it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


class NestedTensor:
    """An ordered group of tensors; arithmetic and conversions apply to every member.

    Args:
        tensors: At least one tensor, each [B, ...] with its own further axes.
    """

    is_nested = True

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"'NestedTensor' object has no attribute {name!r}: expected the latent of one kind, "
            "found those of several together (video and sound); take them apart first "
            "(LTXVSeparateAVLatent)",
            name=name,
            obj=self,
        )

    def _each(self, change: Callable[..., Any], other: Any = None) -> NestedTensor:
        if isinstance(other, NestedTensor):
            if len(other.tensors) != len(self.tensors):
                raise ValueError(
                    f"nested tensors of {len(self.tensors)} and {len(other.tensors)} members"
                )
            pairs: Iterable[tuple[Tensor, Any]] = zip(self.tensors, other.tensors)
        else:
            pairs = ((tensor, other) for tensor in self.tensors)
        return NestedTensor([change(tensor, second) for tensor, second in pairs])

    def __add__(self, other: Any) -> NestedTensor:
        return self._each(lambda a, b: a + b, other)

    def __sub__(self, other: Any) -> NestedTensor:
        return self._each(lambda a, b: a - b, other)

    def __mul__(self, other: Any) -> NestedTensor:
        return self._each(lambda a, b: a * b, other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> NestedTensor:
        return self._each(lambda a, b: a / b, other)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __getitem__(self, index: Any) -> NestedTensor:
        return NestedTensor([tensor[index] for tensor in self.tensors])

    def to(self, *args: Any, **kwargs: Any) -> NestedTensor:
        return NestedTensor([tensor.to(*args, **kwargs) for tensor in self.tensors])

    def cpu(self) -> NestedTensor:
        return self.to("cpu")

    def clone(self) -> NestedTensor:
        return NestedTensor([tensor.clone() for tensor in self.tensors])

    def new_ones(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.tensors[0].new_ones(*args, **kwargs)

    def size(self, dim: int | None = None) -> Any:
        """Size of the first member, which stands for the group."""
        return self.tensors[0].size() if dim is None else self.tensors[0].size(dim)

    def dim(self) -> int:
        return self.tensors[0].dim()

    def unbind(self) -> list[Tensor]:
        """The members."""
        return self.tensors

    def apply_operation(self, other: Any, operation: Callable[[Any, Any], Any]) -> NestedTensor:
        """operation(member, other or its member) for every member."""
        return self._each(operation, other)

    @property
    def shape(self) -> torch.Size:
        return self.tensors[0].shape

    @property
    def ndim(self) -> int:
        return self.tensors[0].ndim

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def layout(self) -> torch.layout:
        return self.tensors[0].layout


def cat_nested(tensors: Sequence[NestedTensor], *args: Any, **kwargs: Any) -> NestedTensor:
    """Concatenate groups member by member, as torch.cat does."""
    groups = zip(*(nested.unbind() for nested in tensors))
    return NestedTensor([torch.cat(group, *args, **kwargs) for group in groups])


def pack(latents: Sequence[Tensor]) -> tuple[Tensor, list[torch.Size]]:
    """Flatten members and join them: ([B, 1, N], shapes of the members)."""
    shapes = [latent.shape for latent in latents]
    return torch.cat([latent.reshape(latent.shape[0], 1, -1) for latent in latents], dim=-1), shapes


def unpack(combined_latent: Tensor, latent_shapes: Sequence[Sequence[int]] | None) -> list[Tensor]:
    """Members of a packed latent; the batch size is that of the packed one.

    Args:
        combined_latent: [B, 1, N], or any tensor when there are fewer than two shapes.
        latent_shapes: Member shapes [B, ...] in order of packing.
    """
    if latent_shapes is None or len(latent_shapes) < 2:
        return [combined_latent]
    sizes = [math.prod(shape[1:]) for shape in latent_shapes]
    parts = combined_latent.split(sizes, dim=-1)
    batch = combined_latent.shape[0]
    return [part.reshape(batch, *shape[1:]) for part, shape in zip(parts, latent_shapes)]
