"""Files that are there whole or not at all, and whose writing can be stopped."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from comfy_execution.context import check_interrupt

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Watched(io.FileIO):
    """Looks for an interruption before every write."""

    def write(self, data: ReadableBuffer, /) -> int:
        check_interrupt()
        return super().write(data)


@contextlib.contextmanager
def watched_file(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a file to be written by an encoder that hands over its data piece by piece.

    An interruption is raised out of the encoder at its next piece. A file that is not finished,
    for whatever reason, is removed.
    """
    try:
        with io.BufferedWriter(_Watched(path, "wb")) as file:
            yield file
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        raise


@contextlib.contextmanager
def partial_file(path: str | io.BytesIO) -> Iterator[str | io.BytesIO]:
    """Where to write a file so that it appears under its name only when it is complete.

    A stream is written directly. Nothing is left of a file whose writing failed.
    """
    if isinstance(path, io.BytesIO):
        yield path
        return
    part = f"{path}.part"
    try:
        yield part
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
