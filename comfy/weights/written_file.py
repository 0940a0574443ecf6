"""Writing safetensors tensor by tensor: nothing is held twice, and a cancellation stops it.

Format: 8 bytes little-endian length of the header; the header, JSON padded with spaces to a
multiple of 8; the tensors' bytes one after the other, those with the widest elements first, so that
each starts at a multiple of its element size.
Source: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import IO, Any

import torch

from comfy.interrupt import throw_exception_if_processing_interrupted
from comfy.weights.mapped_file import PIECE_BYTES, SAFETENSORS_TYPES

_NAMES = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}


def write_tensors(
    file: IO[bytes],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes tensors by key, wherever they are, to an empty file.

    Raises:
        TypeError: a tensor has a dtype that the format has no name for.
        InterruptProcessingException: the prompt was cancelled; the file is then cut off.
    """
    ordered = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for key in ordered:
        tensor = tensors[key]
        if tensor.dtype not in _NAMES:
            raise TypeError(
                f"tensor {key!r} is {tensor.dtype}, which safetensors cannot store; "
                f"convert it to one of {', '.join(map(str, _NAMES))}"
            )
        start, end = end, end + tensor.nelement() * tensor.element_size()
        place = [start, end]
        shape = list(tensor.shape)
        header[key] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": place}
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for key in ordered:
        _write(file, tensors[key])


def _write(file: IO[bytes], tensor: torch.Tensor) -> None:
    """Appends a tensor's bytes, a few rows at a time: rearranging a large one takes long."""
    rows = tensor.detach().reshape(1) if tensor.ndim == 0 else tensor.detach()
    row_bytes = max(rows[0].nelement() * rows.element_size(), 1) if len(rows) else 1
    for piece in rows.split(max(PIECE_BYTES // row_bytes, 1)):
        throw_exception_if_processing_interrupted()
        flat = piece.to("cpu").contiguous().reshape(-1).view(torch.uint8)
        file.write(flat.numpy().data)
