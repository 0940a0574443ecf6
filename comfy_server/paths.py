"""The one resolver of paths that come from requests.

Every name from a query, a form or a URL passes `resolve_below`. It refuses what could mean
different things to different systems (NUL, drive letters, reserved device names, over-long names),
then resolves links and checks that the result lies below the root.
"""

from __future__ import annotations

import ntpath
import os
import re
from collections.abc import Iterable
from pathlib import Path

import folder_paths

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 2048
_RESERVED = re.compile(r"(?i)con|prn|aux|nul|com[0-9]|lpt[0-9]")


class PathRefused(ValueError):
    """A path from outside that is not acceptable; `outside` tells leaving from bad spelling."""

    def __init__(self, message: str, outside: bool = False) -> None:
        super().__init__(message)
        self.outside = outside


def check_name(name: str) -> None:
    """Raises PathRefused unless every component of `name` is a plain file name everywhere."""
    if any(ord(character) < 32 or ord(character) == 127 for character in name):
        raise PathRefused("a file name must not hold control characters")
    if len(name.encode("utf-8", "surrogatepass")) > MAX_PATH_BYTES:
        raise PathRefused(f"a path must not be longer than {MAX_PATH_BYTES} bytes")
    if ntpath.splitdrive(name)[0] or name.startswith(("/", "\\")):
        raise PathRefused(f"{name!r} is absolute; use a name below the folder", outside=True)
    for part in name.replace("\\", "/").split("/"):
        _check_component(part)


def _check_component(part: str) -> None:
    if part == "..":
        raise PathRefused("a path must not hold the component '..'", outside=True)
    if len(part.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
        raise PathRefused(f"a file name must not be longer than {MAX_NAME_BYTES} bytes")
    if _RESERVED.fullmatch(part.partition(".")[0].rstrip()):
        raise PathRefused(f"{part!r} is a reserved device name")
    if os.name == "nt" and ":" in part:
        raise PathRefused(f"{part!r} holds a colon, which names a stream or a drive")
    if any("\ud800" <= character <= "\udfff" for character in part):
        raise PathRefused("a file name must be valid Unicode text")


def resolve_below(root: str | Path, *parts: str) -> Path:
    """Absolute path, links resolved, of the parts joined below `root`.

    Backslashes count as separators whatever the platform, so that a stored name means the same on
    every one. Empty parts are skipped.

    Raises:
        PathRefused: any part is refused by `check_name`, or the result lies outside `root`.
    """
    cleaned = [part.replace("\\", "/") for part in parts if part]
    for part in cleaned:
        check_name(part)
    try:
        return Path(folder_paths.confine(str(root), "/".join(cleaned)))
    except ValueError as error:
        raise PathRefused(str(error), outside=True) from error


def first_below(roots: Iterable[str | Path], *parts: str) -> Path | None:
    """The first existing file of that name among several roots, or None; never raises."""
    for root in roots:
        try:
            candidate = resolve_below(root, *parts)
        except PathRefused:
            continue
        if candidate.is_file():
            return candidate
    return None
