"""Reading and writing state dicts: from a path to tensors by key, whatever the container."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from comfy.devices.runtime import get_runtime
from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.weights.adapter_settings import with_scales
from comfy.weights.encodings import is_encoded, with_settings
from comfy.weights.errors import (
    EmptyWeightFileError,
    HtmlPageError,
    LfsPointerError,
    MissingWeightFileError,
    NotANumberError,
    NotSafetensorsError,
    TextFileError,
    TruncatedWeightFileError,
    UnknownWeightFormatError,
    UnreadableWeightFileError,
)
from comfy.weights.gguf_file import open_gguf
from comfy.weights.low_bit.blocks import BlockCode
from comfy.weights.low_bit.stored import StoredWeight
from comfy.weights.mapped_file import open_tensors
from comfy.weights.pickled import load_pickled
from comfy.weights.written_file import write_tensors

logger = logging.getLogger(__name__)

StateDict = dict[str, torch.Tensor]

SAFETENSORS_SUFFIXES = (".safetensors", ".sft")
_SNIFFED_BYTES = 512

NAN_SAMPLES = 64
"""How many tensors of a file are looked at for numbers."""


def load_torch_file(
    ckpt: str | os.PathLike[str],
    safe_load: bool = False,  # noqa: ARG001 - loading is always safe
    device: torch.device | None = None,
    return_metadata: bool = False,
) -> Any:
    """Read a weight file.

    Safetensors and GGUF files are memory-mapped, and quantised tensors of the latter stay so
    (`StoredWeight`); pickled files go through torch's weights-only reader. The contents decide the
    format, the name only the wording of errors. Scales of adapters that the header gives are among
    the tensors.

    Args:
        ckpt: Path of the file.
        safe_load: Accepted for compatibility; nothing is ever unpickled freely.
        device: Where to put the tensors; None leaves them file-backed on the CPU.
        return_metadata: Also return the file's metadata (None when it has none).
    Returns:
        Tensors by key, or (tensors, metadata).
    Raises:
        WeightFileError: The file is missing, empty, truncated, or not a weight file.
    """
    memory_map = get_runtime().memory.memory_map
    metadata: dict[str, str] | None = None
    state_dict: dict[str, Any]
    container = sniff(ckpt)
    if container == "safetensors":
        tensors, metadata = open_tensors(ckpt, memory_map)
        state_dict = with_settings(tensors, metadata, ckpt)
    elif container == "gguf":
        state_dict, metadata = open_gguf(ckpt, memory_map)
    else:
        state_dict = load_pickled(ckpt, memory_map)
    state_dict = with_scales(state_dict, metadata, ckpt)
    _refuse_nan(ckpt, state_dict)
    if device is not None and torch.device(device).type != "cpu":
        state_dict = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in state_dict.items()
        }
    return (state_dict, metadata) if return_metadata else state_dict


def sniff(path: str | os.PathLike[str]) -> str:
    """Which container a file is, from its first bytes: "safetensors", "gguf" or "pickle".

    Raises:
        WeightFileError: It is neither, with the likely reason.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(_SNIFFED_BYTES)
    except FileNotFoundError as error:
        raise MissingWeightFileError(path, "no such file") from error
    except IsADirectoryError as error:
        raise MissingWeightFileError(path, "is a folder, not a file") from error
    except OSError as error:
        raise UnreadableWeightFileError(path, f"cannot be read ({error.strerror})") from error
    named_safe = os.fspath(path).lower().endswith(SAFETENSORS_SUFFIXES)
    text = head.lstrip().lower()
    if not head:
        raise EmptyWeightFileError(path, "the file is empty")
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        raise HtmlPageError(path, "this is a web page, not a model")
    if text.startswith(b"version https://git-lfs"):
        raise LfsPointerError(path, "this is a Git LFS pointer, the model itself was not fetched")
    if head.startswith(b"GGUF"):
        return "gguf"
    if head.startswith((b"PK\x03\x04", b"\x80")) and not (len(head) > 8 and head[8:9] == b"{"):
        return "pickle"
    if len(head) > 8 and head[8:9] == b"{":
        return "safetensors"
    if len(text) > 8 and text.decode("utf-8", "ignore").isprintable() and not text.isalnum():
        raise TextFileError(path, f"this is a text, not a model: {_first_words(head)!r}")
    if named_safe and len(head) < 9:
        raise TruncatedWeightFileError(path, f"only {len(head)} bytes long")
    if named_safe:
        raise NotSafetensorsError(path, f"no safetensors header, starts with {head[:16]!r}")
    raise UnknownWeightFormatError(path, f"neither safetensors nor torch, starts {head[:16]!r}")


def _first_words(head: bytes) -> str:
    return " ".join(head.decode("utf-8", "ignore").split())[:80]


def _refuse_nan(path: str | os.PathLike[str], tensors: Mapping[str, Any]) -> None:
    """Look at one number in each of some tensors spread over the file.

    Raises:
        NotANumberError: None of them is a number.
    """
    floats = [
        (key, value)
        for key, value in tensors.items()
        if isinstance(value, torch.Tensor)
        and not isinstance(value, StoredWeight)
        and value.is_floating_point()
        and value.numel()
    ]
    looked_at = floats[:: max(1, len(floats) // NAN_SAMPLES)]
    bad = []
    for key, value in looked_at:  # each look may wait for a disk
        throw_exception_if_processing_interrupted()
        if _middle(value).float().isnan().item():
            bad.append(key)
    if bad and len(bad) == len(looked_at):
        raise NotANumberError(path, f"its weights are NaN, not numbers (such as '{bad[0]}')")
    if bad:
        logger.warning("%s: %d of %d weights looked at are NaN, such as %s",
                       os.fspath(path), len(bad), len(looked_at), bad[0])  # fmt: skip


def _middle(tensor: torch.Tensor) -> torch.Tensor:
    """One element from the middle of a tensor."""
    return tensor[tuple(size // 2 for size in tensor.shape)]


def save_torch_file(
    sd: Mapping[str, torch.Tensor],
    ckpt: str | os.PathLike[str],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors as safetensors, replacing the file in one step.

    The old file stays whole until the new one is complete, and mappings of it stay valid.

    Raises:
        TypeError: A tensor has a dtype the format lacks.
        InterruptProcessingException: The prompt was cancelled; the old file is still there.
    """
    folder = os.path.dirname(os.path.abspath(ckpt))
    partial = os.path.join(folder, f"{uuid.uuid4().hex}.part")
    try:
        # not "wb": when a file that was cut to nothing is closed, some systems write it all out
        with open(partial, "xb") as file:
            write_tensors(file, sd, metadata)
        os.replace(partial, ckpt)
    finally:
        if os.path.exists(partial):
            _discard(partial)


def _discard(path: str) -> None:
    """Removes a file; freeing its blocks, a tenth of a second a gigabyte, keeps nobody waiting."""
    if os.name != "posix":  # elsewhere an open file keeps its name
        os.unlink(path)
        return
    handle = os.open(path, os.O_RDONLY)
    os.unlink(path)
    threading.Thread(target=os.close, args=(handle,), name="discard").start()


def state_dict_key_replace(state_dict: StateDict, keys_to_replace: Mapping[str, str]) -> StateDict:
    """Rename keys in place; returns the same dict."""
    for old, new in keys_to_replace.items():
        if old in state_dict:
            state_dict[new] = state_dict.pop(old)
    return state_dict


def state_dict_prefix_replace(
    state_dict: StateDict, replace_prefix: Mapping[str, str], filter_keys: bool = False
) -> StateDict:
    """Replace key prefixes.

    Args:
        state_dict: Changed in place unless `filter_keys`; its matching entries are moved.
        replace_prefix: old prefix -> new prefix.
        filter_keys: Return a new dict of the matching entries only.
    """
    out: StateDict = {} if filter_keys else state_dict
    for old, new in replace_prefix.items():
        for key in [k for k in state_dict if k.startswith(old)]:
            out[new + key[len(old) :]] = state_dict.pop(key)
    return out


def calculate_parameters(sd: Mapping[str, torch.Tensor], prefix: str = "") -> int:
    """Number of weights under a key prefix."""
    return sum(tensor.nelement() for key, tensor in sd.items() if key.startswith(prefix))


def count_parts(keys: Iterable[str], prefix: str) -> int:
    """How many numbered parts a list of modules has: numbers that follow its prefix in the keys."""
    numbers = {key[len(prefix) :].split(".")[0] for key in keys if key.startswith(prefix)}
    return sum(number.isdecimal() for number in numbers)


def weight_dtype(sd: Mapping[str, torch.Tensor], prefix: str = "") -> torch.dtype | None:
    """The type most weights under a key prefix have, or None when there are none.

    Weights stored in a code do not count: it says nothing about the others. Where most are in
    blocks of few bits, the others are what was not worth quantising, and their type says nothing.
    """
    counts: dict[torch.dtype | None, int] = {}
    for key, tensor in sd.items():
        in_blocks = isinstance(tensor, StoredWeight) and isinstance(tensor.code, BlockCode)
        if key.startswith(prefix) and (in_blocks or not is_encoded(key, sd)):
            dtype = None if in_blocks else tensor.dtype
            counts[dtype] = counts.get(dtype, 0) + tensor.numel()
    return max(counts, key=lambda dtype: counts[dtype]) if counts else None
