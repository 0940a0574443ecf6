"""Where converted weights came from: the tensor of a mapped file that gives them again exactly.

A weight that was widened, or laid out anew, as it was loaded needs no second copy in memory to come
back to: converting again does it. Noted for as long as the weight lives; the mapping lives with it.
"""

from __future__ import annotations

import mmap
import weakref

import torch

from comfy.weights.mapped_file import is_file_backed

_sources: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
"""(weight, the file's tensor) by the identity of the weight."""


def note_source(weight: torch.Tensor, tensor: torch.Tensor) -> None:
    """Remember that `weight` was made by converting `tensor`; nothing where that is no file's.

    A system that cannot give pages back (Windows) also keeps others from replacing a mapped file,
    so there mappings are not kept for this.
    """
    if not hasattr(mmap, "MADV_DONTNEED") or not is_file_backed(tensor):
        return
    number = id(weight)
    _sources[number] = (weakref.ref(weight, lambda _: _sources.pop(number, None)), tensor)


def source_of(weight: torch.Tensor) -> torch.Tensor | None:
    """The file's tensor a weight was converted from; whoever uses it compares the contents."""
    found = _sources.get(id(weight))
    if found is None or found[0]() is not weight or found[1].shape != weight.shape:
        return None
    return found[1]
