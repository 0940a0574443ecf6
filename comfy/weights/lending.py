"""A patched weight in the memory of its own original, which is converted from its file again after.

New memory costs more than all arithmetic of a LoRA, and a second copy of a model more than many
machines have. So a weight that was converted from a mapped file lends its memory to its patched
form. A weight that somebody changed since is never overwritten: before it is first written to, the
system must tell that nothing wrote to its pages, or it is compared with what the file gives, bit
for bit. From then on the file leads back, whatever is raised at whatever point.

A file may be replaced (its mapping keeps the old one), but not be written over in place meanwhile.
Where that happens all the same, patches are subtracted, which is right but for rounding, and the
log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comfy.weights import row_blocks
from comfy.weights.holders import is_held_once, owns_memory
from comfy.weights.mapped_file import (
    MappedFile,
    is_as_in_file,
    mapping_of,
    populate_pages,
    release_pages,
)
from comfy.weights.pages import WeightMemory
from comfy.weights.row_blocks import Term
from comfy.weights.sources import Source, fresh_source, note_source, source_of

logger = logging.getLogger(__name__)


class LentWeight:
    """An original whose memory shows its patched form.

    Attributes:
        weight: The original; only its owner may read it, see `copy` and `whole`.
        is_lent: Whether the memory may hold something else than the original.
        patches: What it shows; None in the middle of a change.
    """

    def __init__(
        self, key: str, weight: torch.Tensor, source: Source, mapping: MappedFile,
        memory: WeightMemory,
    ) -> None:  # fmt: skip
        self.key = key
        self.weight = weight
        self.is_lent = False
        self.patches: tuple[Any, ...] | None = None
        self._source = source.tensor
        self._noted = source
        self._mapping = mapping
        self._state = mapping.state()
        self._memory = memory

    def can_write(self) -> bool:
        """Whether no other tensor looks at the memory; the patched form must be gone before."""
        return owns_memory(self.weight)

    @torch.inference_mode()
    def patch(self, patches: Sequence[Any]) -> bool:
        """Write the patched form into the memory.

        Returns:
            False when these are patches of other kinds, or the weight is not what the file gives;
            nothing was written then.
        """
        terms = row_blocks.terms_of(patches, self.weight, self.key)
        if terms is None or not self._is_intact():
            return False
        if not self.is_lent and not self._is_original():
            logger.debug("'%s' differs from its file; it is patched beside", self.key)
            return False
        rows = row_blocks.as_rows(self.weight, self.weight)
        self.patches = None
        if self.is_lent:
            populate_pages(self._source)
            rows.copy_(row_blocks.as_rows(self._source, self.weight))
        elif self._noted.watch is not None:
            self._noted.watch.end()  # every page is written to at once
        self.is_lent = True  # before the first write
        row_blocks.add(rows, terms, self._memory)
        self.patches = tuple(patches)
        release_pages(self._source)
        return True

    def take_back(self) -> None:
        """Have the original in its memory again; the patched form must be gone before."""
        converts = self.is_lent and self._is_intact()
        self._recover(self.weight)
        self.is_lent = False
        if converts and self._is_intact():
            self._noted = fresh_source(self.weight, self._source, self._state)
            note_source(self.weight, self._noted)

    def whole(self) -> torch.Tensor:
        """The original, in new memory if its own still serves the patched form."""
        if self.is_lent:
            with torch.inference_mode(self.weight.is_inference()):
                # a parameter takes no memory of the other kind
                self.weight.data = self.copy()
            self.is_lent = False
        return self.weight

    def copy(self) -> torch.Tensor:
        """A copy of the original."""
        copied = self._memory.empty_like(self.weight)
        self._recover(copied)
        return copied

    @torch.inference_mode()
    def _recover(self, into: torch.Tensor) -> None:
        """Write the original's values to a tensor like it, or to itself."""
        if self.is_lent and self._is_intact():
            populate_pages(self._source)
            into.copy_(self._source)
            release_pages(self._source)
            return
        if into is not self.weight:
            into.copy_(self.weight)
        if self.is_lent:
            self._subtract(row_blocks.as_rows(into, self.weight))

    def _is_original(self) -> bool:
        """Whether the weight, which was not lent, is what its file gives."""
        watch, state, file = self._noted.watch, self._noted.state, self._source
        unwritten = watch is not None and watch.saw_nothing(self.weight)
        if unwritten and state == self._state and is_as_in_file(file):
            return True
        populate_pages(file)
        return self._gives(
            row_blocks.as_rows(file, self.weight), row_blocks.as_rows(self.weight, self.weight)
        )

    def _gives(self, source: torch.Tensor, rows: torch.Tensor) -> bool:
        """Whether converting the file's rows gives the bits of these."""
        bits = torch.int32 if rows.dtype == torch.float32 else torch.int16
        for block, start in row_blocks.converted_blocks(source, rows.dtype, self._memory):
            differing = block.flatten().view(bits)
            differing ^= rows[start : start + len(block)].flatten().view(bits)
            if any(differing.aminmax()):  # on all threads, which `torch.equal` is not
                return False
        return True

    def _is_intact(self) -> bool:
        return self._mapping.state() == self._state

    def _subtract(self, rows: torch.Tensor) -> None:
        """The way back when the file was written over meanwhile: right but for rounding."""
        if not self._mapping.distrusted:
            self._mapping.distrusted = True
            logger.error(
                "'%s' was written over while weights read from it were patched; the patches are "
                "subtracted, so these weights differ from the original by rounding: load it again",
                self._mapping.path,
            )
        terms = row_blocks.terms_of(self.patches or (), self.weight, self.key)
        if terms is None or any(term.strength_model == 0 for term in terms):
            logger.error("'%s' cannot be restored: load its model again", self.key)
            return
        undone = [inverse for term in reversed(terms) for inverse in _inverse(term)]
        row_blocks.add(rows, undone, self._memory)


def lent_weight(
    table: Mapping[str, Any], name: str, key: str, memory: WeightMemory
) -> LentWeight | None:
    """A weight that can lend its memory; None when it has no source, or others hold it.

    Args:
        table: Parameters of its layer.
        name: Its name there; the caller must not hold the weight itself.
        key: Its name in messages.
        memory: Where copies of it are put.
    """
    source = source_of(table[name])
    mapping = None if source is None else mapping_of(source.tensor)
    if source is None or mapping is None or not is_held_once(table, name):
        return None
    if mapping.state()[0] < len(mapping):  # reading what was cut off would end the process
        return None
    return LentWeight(key, table[name], source, mapping, memory)


def _inverse(term: Term) -> list[Term]:
    """Terms that undo one: first the product goes, then the factor of the rows."""
    products = term._replace(strength_model=1.0, alpha=-term.alpha)
    return [products, term._replace(strength_model=1 / term.strength_model, alpha=0.0)]
