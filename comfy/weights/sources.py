"""Where converted weights came from: the tensor of a mapped file that gives them again exactly.

A weight that was widened, or laid out anew, as it was loaded needs no second copy in memory to come
back to: converting again does it. Noted for as long as the weight lives; the mapping lives with it.
"""

from __future__ import annotations

import mmap
import weakref
from typing import NamedTuple

import torch

from comfy.weights.mapped_file import mapping_of
from comfy.weights.write_watch import Watch, watch


class Source(NamedTuple):
    """What a weight was converted from.

    Attributes:
        tensor: The file's tensor.
        state: What the file was like before; see `MappedFile.state`.
        watch: Tells whether the weight was written to since; None where nobody knows.
    """

    tensor: torch.Tensor
    state: tuple[int, int]
    watch: Watch | None


_sources: dict[int, tuple[weakref.ref[torch.Tensor], Source]] = {}
"""(weight, its source) by the identity of the weight."""


def file_state(tensor: torch.Tensor) -> tuple[int, int] | None:
    """What the file of a tensor is like now; None for a tensor that is no file's.

    A system that cannot give pages back (Windows) also keeps others from replacing a mapped file,
    so there mappings are not kept as sources.
    """
    mapping = mapping_of(tensor) if hasattr(mmap, "MADV_DONTNEED") else None
    return None if mapping is None else mapping.state()


def fresh_source(weight: torch.Tensor, tensor: torch.Tensor, state: tuple[int, int]) -> Source:
    """The source of a weight that was converted this moment, so that nobody wrote to it since.

    Args:
        weight: The weight, or a tensor over its memory.
        tensor: The file's tensor.
        state: `file_state` before the conversion.
    """
    return Source(tensor, state, watch(weight))


def note_source(weight: torch.Tensor, source: Source) -> None:
    """Remember what a weight was made from."""
    number = id(weight)
    _sources[number] = (weakref.ref(weight, lambda _: _sources.pop(number, None)), source)


def source_of(weight: torch.Tensor) -> Source | None:
    """What a weight was converted from; whoever uses it makes sure of the contents."""
    found = _sources.get(id(weight))
    if found is None or found[0]() is not weight or found[1].tensor.shape != weight.shape:
        return None
    return found[1]
