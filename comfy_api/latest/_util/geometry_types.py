"""Shapes in three dimensions, and files that hold them."""

from __future__ import annotations

import shutil
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class VOXEL:
    """Occupancy on a grid: `data` `[B, D, H, W]`."""

    def __init__(self, data: Tensor) -> None:
        self.data = data


class MESH:
    """Triangles: `vertices` `[B, N, 3]`, `faces` `[B, M, 3]` with indices of vertices."""

    def __init__(self, vertices: Tensor, faces: Tensor) -> None:
        self.vertices = vertices
        self.faces = faces


class File3D:
    """A file with a 3D model, on disk or in memory.

    Args:
        source: Path, or an open binary stream, which is read from its start.
        file_format: Suffix without a dot; taken from the path if empty.
    """

    def __init__(self, source: str | IO[bytes], file_format: str = "") -> None:
        self._source = source
        suffix = Path(source).suffix if isinstance(source, str) else ""
        self._format = (file_format or suffix).lstrip(".").lower()

    @property
    def format(self) -> str:
        """Suffix without a dot, in lower case; may be empty."""
        return self._format

    @format.setter
    def format(self, value: str) -> None:
        self._format = value.lstrip(".").lower()

    @property
    def is_disk_backed(self) -> bool:
        """Whether the source is a path."""
        return isinstance(self._source, str)

    def get_source(self) -> str | IO[bytes]:
        """The path, or the stream at its start."""
        if not isinstance(self._source, str):
            self._source.seek(0)
        return self._source

    def get_bytes(self) -> bytes:
        """The whole content."""
        if isinstance(self._source, str):
            return Path(self._source).read_bytes()
        self._source.seek(0)
        return self._source.read()

    def get_data(self) -> BytesIO:
        """The whole content as a stream of its own."""
        return BytesIO(self.get_bytes())

    def save_to(self, path: str) -> str:
        """Writes the content to a path, whose folder is made if need be; returns the path."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(self._source, str):
            if Path(self._source).resolve() != target.resolve():
                shutil.copyfile(self._source, target)
        else:
            target.write_bytes(self.get_bytes())
        return str(target)

    def __repr__(self) -> str:
        where = self._source if isinstance(self._source, str) else "stream"
        return f"File3D({where!r}, format={self._format!r})"
