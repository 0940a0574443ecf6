"""Facts about model files that are read without loading them."""

from __future__ import annotations

import base64
import binascii
import json
import os
import struct
import tempfile
from pathlib import Path
from typing import Any

import folder_paths
from comfy_server.images import ImageRefused, thumbnail_webp
from comfy_server.paths import check_name
from utils.file_listing import filter_files_extensions, recursive_search

MAX_HEADER_BYTES = 1024 * 1024
PREVIEW_SUFFIXES = (".webp", ".png", ".jpg", ".jpeg", ".gif", ".bmp", ".avif")
COVER_KEYS = ("modelspec.thumbnail", "ssmd_cover_images", "thumbnail", "cover")


def safetensors_metadata(path: Path) -> dict[str, Any] | None:
    """The `__metadata__` of a safetensors header of at most 1 MiB, else None."""
    if path.suffix.lower() not in (".safetensors", ".sft"):
        return None
    with path.open("rb") as stream:
        prefix = stream.read(8)
        if len(prefix) < 8:
            return None
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER_BYTES:
            return None
        header = stream.read(length)
    try:
        metadata = json.loads(header).get("__metadata__")
    except (ValueError, AttributeError, RecursionError):
        return None
    return metadata if isinstance(metadata, dict) else None


def below_linked(root: str, relative: str) -> Path | None:
    """A file below a model folder, links followed: owners link their collections in.

    Raises:
        PathRefused: the name climbs out or is unusable.
    """
    check_name(relative.replace("\\", "/"))
    path = Path(root, relative.replace("\\", "/"))
    return path if path.is_file() else None


def list_files(folder_name: str) -> list[dict[str, Any]]:
    """Every file of a category with its folder's index, times (s) and size (bytes)."""
    directories, extensions = folder_paths.folder_names_and_paths[folder_name][:2]
    found: list[dict[str, Any]] = []
    for index, directory in enumerate(directories):
        names, _ = recursive_search(directory)
        for name in filter_files_extensions(names, extensions):
            if any(part.startswith(".") for part in Path(name).parts):
                continue
            try:
                status = os.stat(os.path.join(directory, name))
            except OSError:
                continue  # removed meanwhile, or a link that leads nowhere
            found.append(
                {
                    "name": name,
                    "pathIndex": index,
                    "modified": status.st_mtime,
                    "created": status.st_ctime,
                    "size": status.st_size,
                }
            )
    return found


def preview_webp(directory: str, relative: str) -> bytes | None:
    """A picture beside a model, or the cover in its header, as webp; None if there is none.

    Args:
        relative: The model's name with any suffix: the page asks for `<stem>.webp`.
    Raises:
        PathRefused: the name climbs out or is unusable.
    """
    check_name(relative.replace("\\", "/"))
    stem = os.path.splitext(relative.replace("\\", "/"))[0]
    for suffix in PREVIEW_SUFFIXES:
        for name in (f"{stem}{suffix}", f"{stem}.preview{suffix}"):
            path = below_linked(directory, name)
            if path is not None:
                try:
                    return thumbnail_webp(path)
                except ImageRefused:
                    continue
    return _cover(directory, stem)


def _cover(directory: str, stem: str) -> bytes | None:
    for suffix in (".safetensors", ".sft"):
        path = below_linked(directory, stem + suffix)
        encoded = None if path is None else _encoded_cover(safetensors_metadata(path) or {})
        if encoded is not None:
            return _decode_cover(encoded)
    return None


def _encoded_cover(metadata: dict[str, Any]) -> str | None:
    for key in COVER_KEYS:
        value = metadata.get(key)
        if isinstance(value, str) and value.startswith("["):
            try:
                value = next(iter(json.loads(value)), None)
            except (ValueError, RecursionError):
                continue
        if isinstance(value, str) and value:
            return value.partition("base64,")[2] or value
    return None


def _decode_cover(encoded: str) -> bytes | None:
    try:
        data = base64.b64decode(encoded, validate=False)
    except (binascii.Error, ValueError):
        return None
    with tempfile.NamedTemporaryFile() as stream:
        stream.write(data)
        stream.flush()
        try:
            return thumbnail_webp(Path(stream.name))
        except ImageRefused:
            return None
