"""Reads GGUF files: tensors by name, quantised ones as `StoredWeight`, and what the header says.

The file is memory-mapped and nothing is decoded. Files of diffusion models keep the names their
weights were published with; those of text encoders have the names of llama.cpp, and are given
here under the published ones (`comfy.weights.gguf_text`).
Source of the format: https://github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from comfy.weights import gguf_text
from comfy.weights.errors import (
    TruncatedWeightFileError,
    UnknownWeightFormatError,
    WeightFileError,
)
from comfy.weights.low_bit.blocks import BlockCode
from comfy.weights.low_bit.ggml import GGML_TYPES, NAMES_OF_OTHERS, known_names
from comfy.weights.low_bit.stored import StoredWeight
from comfy.weights.mapped_file import MAX_AXES, file_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
USUAL_ALIGNMENT = 32
MOST_ENTRIES = 1 << 26  # of a header or a list in it; more is a damaged file
SHOWN = 60  # characters of a value that messages show

ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""Header entry, before a tensor's name, of the shape it had before it was quantised."""

FIXED: dict[int, str] = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
"""Kinds of values of one size, for `struct`."""

TEXT, LIST = 8, 9
"""The other kinds."""


class NotGgufError(WeightFileError):
    """The contents break the GGUF format."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: number of its type, shape as torch has it, place in the file in bytes."""

    kind: int
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class GgufHeader:
    """What a file says about itself.

    Attributes:
        facts: Numbers, texts and lists by key.
        tensors: By name, in file order.
    """

    facts: dict[str, Any]
    tensors: dict[str, GgufTensor] = field(default_factory=dict)

    def metadata(self) -> dict[str, str]:
        """Texts and numbers as other weight files have them."""
        return {k: str(v) for k, v in self.facts.items() if not isinstance(v, list)}

    def number(self, path: str | os.PathLike[str], key: str, usual: int, least: int = 0) -> int:
        """A whole number, or the usual one where nothing is said.

        Raises:
            NotGgufError: It is something else, or too small.
        """
        value = self.facts.get(key, usual)
        if type(value) is not int or value < least:
            found = f"{key} is {_short(value)}"
            raise NotGgufError(path, f"{found}, expected a whole number from {least} on")
        return value


class _Cursor:
    """Reads values one after another."""

    def __init__(self, path: str | os.PathLike[str], data: memoryview) -> None:
        self.path, self.data, self.place = path, data, 0

    def take(self, form: str) -> Any:
        """The next value of a fixed size."""
        size = struct.calcsize(form)
        if self.place + size > len(self.data):
            raise self._ended()
        (value,) = struct.unpack_from(form, self.data, self.place)
        self.place += size
        return value

    def count(self, what: str) -> int:
        """The next number of entries."""
        value = self.take("<Q")
        if value > MOST_ENTRIES:
            raise NotGgufError(self.path, f"its header announces {value} {what}")
        return int(value)

    def text(self) -> str:
        """The next text."""
        length = self.take("<Q")
        if length > len(self.data) - self.place:
            raise self._ended()
        raw = bytes(self.data[self.place : self.place + length])
        self.place += length
        return raw.decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """The next value of a kind."""
        if kind in FIXED:
            return self.take(FIXED[kind])
        if kind == TEXT:
            return self.text()
        if kind != LIST:
            raise NotGgufError(self.path, f"its header holds a value of unknown kind {kind}")
        inner, count = self.take("<I"), self.count("values")
        if inner in FIXED:
            form = f"<{count}{FIXED[inner][1]}"
            size = struct.calcsize(form)
            if size > len(self.data) - self.place:
                raise self._ended()
            values = list(struct.unpack_from(form, self.data, self.place))
            self.place += size
            return values
        if inner == LIST:
            raise NotGgufError(self.path, "its header holds lists of lists")
        return [self.value(inner) for _ in range(count)]

    def _ended(self) -> TruncatedWeightFileError:
        return TruncatedWeightFileError(
            self.path, f"its header goes on after the end, byte {len(self.data)}"
        )


def read_header(path: str | os.PathLike[str], data: memoryview) -> GgufHeader:
    """Read and check the header.

    Args:
        path: For messages.
        data: The whole file.
    Raises:
        WeightFileError: The file is cut off, no GGUF file, or has a type that cannot be read.
    """
    cursor = _Cursor(path, data)
    if bytes(data[:4]) != MAGIC:
        raise NotGgufError(path, f"no GGUF header, starts with {bytes(data[:16])!r}")
    cursor.place = 4
    version = cursor.take("<I")
    if version not in VERSIONS:
        swapped = struct.unpack(">I", struct.pack("<I", version))[0] in VERSIONS
        found = "with big-endian numbers" if swapped else f"of version {version}"
        raise UnknownWeightFormatError(
            path,
            f"this is a GGUF file {found}",
            "take a little-endian file of version 2 or 3, which current tools write",
        )
    tensors, facts = cursor.count("tensors"), cursor.count("facts")
    header = GgufHeader({cursor.text(): cursor.value(cursor.take("<I")) for _ in range(facts)})
    _refuse_parts(path, header)
    places = [_tensor(cursor) for _ in range(tensors)]
    alignment = header.number(path, "general.alignment", USUAL_ALIGNMENT, least=1)
    begin = -(-cursor.place // alignment) * alignment
    for name, kind, shape, offset in places:
        if name in header.tensors:
            raise NotGgufError(path, f"its header names '{_short(name)}' twice")
        shape = _original_shape(path, name, shape, header.facts)
        entry = GgufTensor(kind, shape, begin + offset)
        end = entry.start + _size(path, name, entry)
        if end > len(data):
            raise TruncatedWeightFileError(
                path, f"'{name}' ends at byte {end}, the file has {len(data)}"
            )
        header.tensors[name] = entry
    return header


def _short(value: Any) -> str:
    """A value of a header as messages show it; it may be of any length."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _refuse_parts(path: str | os.PathLike[str], header: GgufHeader) -> None:
    count = header.number(path, "split.count", 1)  # 0 in files that were joined
    if count > 1:
        number = header.number(path, "split.no", 0) + 1
        raise UnknownWeightFormatError(
            path,
            f"this is part {number} of {count} of a model",
            "fetch all parts and join them with: llama-gguf-split --merge FIRST_PART WHOLE_FILE",
        )


def _original_shape(
    path: str | os.PathLike[str], name: str, shape: tuple[int, ...], facts: Mapping[str, Any]
) -> tuple[int, ...]:
    """The shape a tensor had before it was quantised, where the header gives it.

    Raises:
        NotGgufError: It is none, or of another number of elements.
    """
    given = facts.get(ORIGINAL_SHAPE + name)
    if given is None:
        return shape
    sound = isinstance(given, list) and len(given) <= MAX_AXES
    sound = sound and all(type(size) is int and size >= 0 for size in given)
    if not sound or math.prod(given) != math.prod(shape):
        raise NotGgufError(
            path, f"'{name}' is said to have had the shape {_short(given)}; it has {list(shape)}"
        )
    return tuple(given)


def _tensor(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Name, type, shape and offset of the next tensor."""
    name, axes = cursor.text(), cursor.take("<I")
    if axes > MAX_AXES:
        raise NotGgufError(cursor.path, f"'{name}' has {axes} axes")
    sizes = [cursor.take("<Q") for _ in range(axes)]
    kind, offset = cursor.take("<I"), cursor.take("<Q")
    return name, kind, tuple(reversed(sizes)), offset


def _size(path: str | os.PathLike[str], name: str, tensor: GgufTensor) -> int:
    """Bytes of a tensor.

    Raises:
        UnknownWeightFormatError: Its type cannot be read.
        NotGgufError: It has an impossible shape.
    """
    kind = GGML_TYPES.get(tensor.kind)
    if kind is None:
        known = NAMES_OF_OTHERS.get(tensor.kind, f"number {tensor.kind}")
        raise UnknownWeightFormatError(
            path,
            f"'{name}' is quantised as {known}",
            f"take a version of the model in another quantisation ({known_names()})",
        )
    count = math.prod(tensor.shape)
    widest = math.prod(max(size, 1) for size in tensor.shape)  # torch multiplies them beside a 0
    if widest >= 1 << 62 or count % kind.elements:
        raise NotGgufError(
            path,
            f"'{name}' has the shape {list(tensor.shape)}, which {kind.name} cannot hold: it has "
            f"blocks of {kind.elements}",
        )
    return count // kind.elements * kind.size


def open_gguf(
    path: str | os.PathLike[str], memory_map: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a GGUF file, quantised ones undecoded, and its metadata.

    Args:
        path: The file.
        memory_map: Back the tensors by the file; False reads it into memory.
    Raises:
        WeightFileError: See `read_header`, and what names text encoders.
    """
    whole = file_bytes(path, memory_map)
    header = read_header(path, whole.numpy().data)
    tensors = {name: _of_file(whole, path, name, t) for name, t in header.tensors.items()}
    return gguf_text.published(tensors, header.facts, path), header.metadata()


def _of_file(whole: Tensor, path: str | os.PathLike[str], name: str, tensor: GgufTensor) -> Tensor:
    kind = GGML_TYPES[tensor.kind]
    shape = torch.Size(tensor.shape)
    data = whole[tensor.start : tensor.start + _size(path, name, tensor)]
    if kind.unpack is None:
        assert kind.dtype is not None
        aligned = data if data.data_ptr() % kind.size == 0 else data.clone()
        return aligned.view(kind.dtype).reshape(shape)
    code = BlockCode(kind.name, shape, kind.elements, kind.size, kind.unpack)
    rows = shape[0] if code.has_whole_rows else 1
    return StoredWeight(data.reshape(rows, len(data) // max(rows, 1)), code, shape)
