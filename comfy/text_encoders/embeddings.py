"""Finds and reads textual-inversion embeddings: small files with rows for the token table.

A name is looked for below the given folders only; a path that leads outside is not followed.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comfy.weights.state_dict import load_torch_file

logger = logging.getLogger(__name__)

EXTENSIONS = (".safetensors", ".pt", ".bin")
ZIPPED_WIDTHS = (768, 1024)


def expand_directory_list(directories: Iterable[str]) -> list[str]:
    """The given folders and all folders below them."""
    found: dict[str, None] = {}
    for directory in directories:
        for root, _, _ in os.walk(directory, followlinks=True):
            found[root] = None
    return list(found)


def find_embedding(name: str, directories: str | Iterable[str]) -> Path | None:
    """The file of an embedding, by its name with or without extension, in the first folder that has
    it."""
    if isinstance(directories, str):
        directories = [directories]
    if "\0" in name:  # no file has such a name
        return None
    for directory in expand_directory_list(directories):
        base = os.path.realpath(directory)
        for candidate in (name, *(name + extension for extension in EXTENSIONS)):
            path = os.path.realpath(os.path.join(base, candidate))
            if os.path.commonpath([base, path]) == base and os.path.isfile(path):
                return Path(path)
    return None


def load_embed(
    embedding_name: str,
    embedding_directory: str | Iterable[str],
    embedding_size: int,
    embed_key: str | None = None,
) -> Tensor | None:
    """Rows of an embedding, ``[rows, width]`` or ``[width]``; None when there is no such file.

    Args:
        embedding_name: Name a prompt used.
        embedding_directory: Folder or folders to search.
        embedding_size: Width of the encoder; chooses among several tensors in one file.
        embed_key: Name of the encoder's tensor in files for several encoders ("clip_l", "clip_g").
    Raises:
        ValueError: The file exists and holds no embedding.
    """
    path = find_embedding(embedding_name, embedding_directory)
    if path is None:
        return None
    return _choose(_read(path), path, embedding_size, embed_key)


def _read(path: Path) -> Any:
    """Contents of a file: tensors by name, or what an old pickled file holds (read without
    code)."""
    if path.suffix.lower() == ".safetensors":
        return load_torch_file(str(path))
    return torch.load(str(path), map_location="cpu", weights_only=True)


def safe_load_embed_zip(embed_path: str) -> Tensor:
    """Rows ``[rows, width]`` of the embedding in a zipped file of torch, whose pickle is not read.

    Of its float32 tensors the last one counts that holds a row at least. Rows are 768 or 1024
    values, whichever divides them, as those of Stable Diffusion 1 and 2 are.

    Raises:
        ValueError: The file holds no such tensor.
    """
    with zipfile.ZipFile(embed_path) as archive:
        names = [name for name in archive.namelist() if "data/" in name]
        for name in reversed(names):
            data = archive.read(name)
            values = len(data) // torch.float32.itemsize
            width = next((width for width in ZIPPED_WIDTHS if values % width == 0), None)
            if width is not None and values:
                rows = torch.frombuffer(bytearray(data), dtype=torch.float32)
                return rows.view(-1, width)
    raise ValueError(
        f"{embed_path} holds no embedding: expected a float32 tensor of rows of "
        f"{' or '.join(map(str, ZIPPED_WIDTHS))} values"
    )


def _choose(contents: Any, path: Path, width: int, key: str | None) -> Tensor:
    """The tensor meant for an encoder of some width among a file's contents."""
    if isinstance(contents, list):  # several training runs in one file
        tensors = [t for part in contents if isinstance(part, Mapping) for t in _tensors(part)]
    elif isinstance(contents, Mapping):
        if "string_to_param" in contents:
            contents = contents["string_to_param"]
        if key is not None and isinstance(contents.get(key), Tensor):
            return contents[key]
        tensors = _tensors(contents)
        if tensors:
            return tensors[0]
    else:
        tensors = []
    fitting = [tensor for tensor in tensors if tensor.ndim and tensor.shape[-1] == width]
    if fitting:
        return torch.cat([tensor.reshape(-1, width) for tensor in fitting])
    widths = ", ".join(str(tuple(tensor.shape)) for tensor in tensors) or "no tensor"
    raise ValueError(f"{path.name} holds no embedding of width {width}; it holds {widths}")


def _tensors(contents: Mapping[Any, Any]) -> list[Tensor]:
    return [value for value in contents.values() if isinstance(value, Tensor)]
