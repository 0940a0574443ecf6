"""Files in a user's folder: writing, listing, describing, moving. No HTTP in here."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LISTED = 100_000


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file in one step, so that a crash leaves the old or the new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".saving-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def file_info(path: Path, root: Path) -> dict[str, Any]:
    """Path from `root` with `/`, size in bytes, times in seconds."""
    status = path.stat()
    return {
        "path": path.relative_to(root).as_posix(),
        "size": status.st_size,
        "modified": status.st_mtime,
        "created": status.st_ctime,
    }


@dataclass(frozen=True)
class Listing:
    """How a folder is listed."""

    recurse: bool = False
    full_info: bool = False
    split: bool = False


def list_folder(folder: Path, how: Listing) -> list[Any]:
    """Files of a folder; names that start with a dot are left out.

    Returns:
        Paths relative to the folder; with `split`, lists [path, part, part...]; with `full_info`,
        the objects of `file_info`.
    """
    pattern = "**/*" if how.recurse else "*"
    found = sorted(
        path for path in folder.glob(pattern) if path.is_file() and not path.name.startswith(".")
    )[:MAX_LISTED]
    if how.full_info:
        return [file_info(path, folder) for path in found]
    names = [path.relative_to(folder).as_posix() for path in found]
    return [[name, *name.split("/")] for name in names] if how.split else list(names)


def tree(folder: Path, root: Path) -> list[dict[str, Any]]:
    """Everything below a folder, directories first, by name; paths count from `root`."""
    entries: list[dict[str, Any]] = []
    for current, folders, files in os.walk(folder):
        base = Path(current)
        entries += [_tree_entry(base / name, root, "directory") for name in folders]
        entries += [_tree_entry(base / name, root, "file") for name in files]
        if len(entries) > MAX_LISTED:
            break
    entries.sort(key=lambda entry: (entry["type"] == "file", entry["name"].casefold()))
    return entries


def _tree_entry(path: Path, root: Path, kind: str) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": path.name,
        "path": path.relative_to(root).as_posix(),
        "type": kind,
    }
    if kind == "file":
        try:
            status = path.stat()
        except OSError:
            return entry  # a link that leads nowhere
        entry |= {"size": status.st_size, "modified": status.st_mtime}
    return entry


def move(source: Path, destination: Path, overwrite: bool) -> bool:
    """Moves a file; False when the destination exists and must not be replaced."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if overwrite:
        os.replace(source, destination)
        return True
    if destination.exists():
        return False
    os.rename(source, destination)
    return True
