"""Safetensors files as memory: tensors are views of a private mapping, pages come as they are used.

Writing to such a tensor copies the page written to and never reaches the file. After a tensor has
been converted to another type its pages can be given back with `release_pages`, so that a file is
never held twice.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.weights import page_table
from comfy.weights.errors import NotSafetensorsError, TruncatedWeightFileError

MAX_HEADER_BYTES = 100_000_000
"""Largest header accepted, the format's own bound; it is read before anything is believed."""

MAX_AXES = 64
"""Most axes torch gives a tensor."""

SAFETENSORS_TYPES: dict[str, torch.dtype] = {
    name: getattr(torch, attribute)
    for name, attribute in {
        "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
        "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U64": "uint64",
        "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool", "C64": "complex64",
    }.items()
    if hasattr(torch, attribute)
}  # fmt: skip


PIECE_BYTES = 4 << 20  # read or written at once, so that a cancellation is noticed in between


POPULATED_BYTES = 1 << 20  # entered in the page table at once; other threads may run in between

MADV_POPULATE_READ = 22  # of Linux; Python has no name for it


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: type, shape and byte range within the data part."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """What a file says about itself.

    Attributes:
        entries: Tensors by key, in file order.
        metadata: Text by key, as the file's author wrote it.
        data_start: Offset of the data part in the file, in bytes.
    """

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int


class MappedFile(mmap.mmap):
    """A private, writable mapping of a whole file; alive as long as any tensor over it."""

    path: str
    base: int
    descriptor: int
    distrusted = False
    """It was found written over while something depended on its contents, and that was said."""

    def state(self) -> tuple[int, int]:
        """(size in bytes, time of the last change in ns) of the file mapped, whatever its name now.

        As long as it stays, reading the mapping gives what it gave before.
        """
        facts = os.fstat(self.descriptor)
        return facts.st_size, facts.st_mtime_ns


_mappings: weakref.WeakValueDictionary[int, MappedFile] = weakref.WeakValueDictionary()
"""Living mappings by the address of their first byte."""


def read_header(path: str | os.PathLike[str]) -> SafetensorsHeader:
    """Read and check the header of a safetensors file.

    Raises:
        TruncatedWeightFileError: The file is shorter than its header says.
        NotSafetensorsError: The header breaks the format.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise TruncatedWeightFileError(path, f"only {size} bytes long")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            raise NotSafetensorsError(
                path, f"header of {length} bytes announced, at most {MAX_HEADER_BYTES} allowed"
            )
        if 8 + length > size:
            raise TruncatedWeightFileError(
                path, f"header needs {8 + length} bytes, the file has {size}"
            )
        text = file.read(length)
    try:
        raw = json.loads(text, object_pairs_hook=_without_repeats)
    except KeyError as error:
        raise NotSafetensorsError(path, f"header names {error} twice") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise NotSafetensorsError(path, f"header is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise NotSafetensorsError(path, "header is not a JSON object")
    return _checked_header(path, raw, 8 + length, size)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; KeyError for a name it has twice."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        raise KeyError(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return made


def safetensors_header(
    safetensors_path: str | os.PathLike[str], max_size: int = MAX_HEADER_BYTES
) -> bytes | None:
    """The raw JSON header of a file; None when it is longer than `max_size` bytes or cut off."""
    with open(safetensors_path, "rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return None
        (length,) = struct.unpack("<Q", prefix)
        if length > max_size:
            return None
        header = file.read(length)
    return header if len(header) == length else None


def _checked_header(
    path: str | os.PathLike[str], raw: dict[str, Any], data_start: int, size: int
) -> SafetensorsHeader:
    metadata = raw.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise NotSafetensorsError(path, "__metadata__ is not an object")
    entries = {key: _checked_entry(path, key, value) for key, value in raw.items()}
    position = 0
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.end)):
        if entry.start != position:
            raise NotSafetensorsError(path, f"tensors overlap or leave a gap at byte {position}")
        position = entry.end
    if data_start + position > size:
        raise TruncatedWeightFileError(
            path, f"tensors need {data_start + position} bytes, the file has {size}"
        )
    if data_start + position < size:
        raise NotSafetensorsError(
            path, f"{size - data_start - position} bytes after the last tensor belong to none"
        )
    text = {str(key): str(value) for key, value in metadata.items()}
    return SafetensorsHeader(entries, text, data_start)


def _checked_entry(path: str | os.PathLike[str], key: str, value: Any) -> TensorEntry:
    try:
        name, shape, (start, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers = (*shape, start, end)
        sound = all(type(n) is int and 0 <= n < 2**63 for n in numbers) and start <= end
        sound = sound and len(shape) <= MAX_AXES
    except (KeyError, TypeError, ValueError) as error:
        raise NotSafetensorsError(path, f"entry '{key}' is incomplete ({error!r})") from error
    if not sound:
        raise NotSafetensorsError(path, f"entry '{key}' has an impossible shape or range")
    dtype = SAFETENSORS_TYPES.get(name)
    if dtype is None:
        raise NotSafetensorsError(
            path, f"entry '{key}' has type {name!r}; known: {', '.join(SAFETENSORS_TYPES)}"
        )
    if math.prod(shape) * dtype.itemsize != end - start:
        raise NotSafetensorsError(
            path,
            f"entry '{key}' needs {math.prod(shape) * dtype.itemsize} bytes, has {end - start}",
        )
    return TensorEntry(dtype, shape, start, end)


def open_tensors(
    path: str | os.PathLike[str], memory_map: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a safetensors file and its metadata.

    Args:
        path: The file.
        memory_map: Back the tensors by the file; False reads it into memory.
    Returns:
        (tensors by key in file order, metadata).
    Raises:
        WeightFileError: See `read_header`.
    """
    header = read_header(path)
    whole = file_bytes(path, memory_map)
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in header.entries.items():
        data = whole[header.data_start + entry.start : header.data_start + entry.end]
        if data.data_ptr() % entry.dtype.itemsize:  # old writers did not align the data part
            data = data.clone()
        tensors[key] = data.view(entry.dtype).reshape(entry.shape)
    return tensors, header.metadata


def file_bytes(path: str | os.PathLike[str], memory_map: bool = True) -> torch.Tensor:
    """All bytes of a file; see `open_tensors`."""
    return _map(path) if memory_map else _read(path)


def _map(path: str | os.PathLike[str]) -> torch.Tensor:
    with open(path, "rb") as file:
        mapping = MappedFile(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapping.descriptor = os.dup(file.fileno())
        weakref.finalize(mapping, os.close, mapping.descriptor).atexit = False
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    mapping.path = os.fspath(path)
    mapping.base = whole.data_ptr()
    _mappings[mapping.base] = mapping
    return whole


def _read(path: str | os.PathLike[str]) -> torch.Tensor:
    whole = torch.empty(os.path.getsize(path), dtype=torch.uint8)
    data = whole.numpy().data
    with open(path, "rb") as file:
        for start in range(0, len(data), PIECE_BYTES):
            throw_exception_if_processing_interrupted()
            file.readinto(data[start : start + PIECE_BYTES])
    return whole


def mapping_of(tensor: torch.Tensor) -> MappedFile | None:
    """The file mapping a tensor's memory belongs to, or None."""
    if tensor.device.type != "cpu" or not _mappings:
        return None
    return _mappings.get(tensor.untyped_storage().data_ptr())


def is_file_backed(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory is a file's, so that its pages cost nothing to drop."""
    return mapping_of(tensor) is not None


def populate_pages(tensor: torch.Tensor) -> None:
    """Enter the pages of a file-backed tensor that is about to be read in the page table.

    Met one by one while it is read, they cost as much as converting the tensor; asked for together
    a tenth of that. Where the system cannot be asked (Linux before 5.14), they are met one by one.
    Source: https://man7.org/linux/man-pages/man2/madvise.2.html, MADV_POPULATE_READ
    """
    mapping = mapping_of(tensor)
    advise = getattr(mapping, "madvise", None)
    if mapping is None or advise is None or sys.platform != "linux":
        return
    start = tensor.data_ptr() - mapping.base
    end = start + tensor.nelement() * tensor.element_size()
    start = start // mmap.PAGESIZE * mmap.PAGESIZE
    with contextlib.suppress(OSError):
        for piece in range(start, end, POPULATED_BYTES):
            advise(MADV_POPULATE_READ, piece, min(POPULATED_BYTES, end - piece))


def release_pages(tensor: torch.Tensor) -> int:
    """Give the physical memory of a file-backed tensor back; the next use reads the file again.

    A page that was written to exists nowhere else, so a tensor with such a page is left alone.

    Returns:
        Bytes given back (whole pages); 0 when there is nothing to give back safely.
    """
    mapping = mapping_of(tensor)
    advise = getattr(mapping, "madvise", None)
    if mapping is None or advise is None or not hasattr(mmap, "MADV_DONTNEED"):
        return 0
    start = tensor.data_ptr() - mapping.base
    end = start + tensor.nelement() * tensor.element_size()
    page = mmap.PAGESIZE
    start, end = -(-start // page) * page, end // page * page
    if end <= start or not page_table.is_clean(mapping.base + start, end - start):
        return 0
    advise(mmap.MADV_DONTNEED, start, end - start)
    return end - start


def is_as_in_file(tensor: torch.Tensor) -> bool:
    """Whether nobody wrote to a tensor of a mapping, nor to what shares a page with it."""
    mapping = mapping_of(tensor)
    if mapping is None:
        return False
    start = tensor.data_ptr()
    end = start + tensor.nelement() * tensor.element_size()
    page = mmap.PAGESIZE
    start, end = start // page * page, -(-end // page) * page
    return page_table.is_clean(start, end - start)
