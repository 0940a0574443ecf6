"""Receiving files: a bounded multipart form, and a place and name for its file."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import shutil
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from comfy_server.images import ImageRefused, open_image
from comfy_server.paths import PathRefused, resolve_below

MAX_PARTS = 32
MAX_TEXT_BYTES = 64 * 1024
CHUNK_BYTES = 256 * 1024
IN_MEMORY_BYTES = 1024 * 1024

_naming = threading.Lock()  # finding a free name and taking it is one step


class UploadRefused(ValueError):
    """A form that is not acceptable; the text says what is missing."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class UploadForm:
    """The texts of a form and its one file."""

    texts: dict[str, str] = field(default_factory=dict)
    filename: str = ""
    file: BinaryIO | None = None

    def close(self) -> None:
        """Drops the received file."""
        if self.file is not None:
            self.file.close()


async def read_form(request: web.Request, file_field: str = "image") -> UploadForm:
    """Reads a multipart body; the file goes to disk when it is large.

    Raises:
        UploadRefused: not multipart, too many or too long parts, no file in `file_field`.
        web.HTTPRequestEntityTooLarge: the file exceeds the limit on bodies.
    """
    if not request.content_type.startswith("multipart/"):
        raise UploadRefused(f"expected multipart/form-data, found {request.content_type}")
    form = UploadForm()
    try:
        await _read_parts(request, form, file_field)
    except BaseException:
        form.close()
        raise
    if form.file is None or not form.filename:
        form.close()
        raise UploadRefused(f"the form has no file in the field {file_field!r}")
    return form


async def _read_parts(request: web.Request, form: UploadForm, file_field: str) -> None:
    try:
        reader = await request.multipart()
        for _ in range(MAX_PARTS):
            part = await reader.next()
            if part is None:
                return
            if not isinstance(part, BodyPartReader):
                raise UploadRefused("nested multipart forms are not accepted")
            if part.name == file_field and part.filename:
                form.filename = part.filename
                form.file = await _receive(part, request.client_max_size)
            elif part.name:
                form.texts[part.name] = await _read_text(part)
    except (ValueError, AssertionError, EOFError, HttpProcessingError) as error:
        if isinstance(error, UploadRefused):
            raise
        reason = getattr(error, "message", "") or str(error)
        raise UploadRefused(f"the multipart form is damaged: {reason[:200]}") from error
    raise UploadRefused(f"a form has at most {MAX_PARTS} parts")


async def _receive(part: BodyPartReader, limit: int) -> BinaryIO:
    spool = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115  the form closes it
    size = 0
    while chunk := await part.read_chunk(CHUNK_BYTES):
        size += len(chunk)
        if size > limit:
            spool.close()
            raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=size)
        spool.write(chunk)
    spool.seek(0)
    return spool  # type: ignore[return-value]  # a spooled file is a BinaryIO in all but name


async def _read_text(part: BodyPartReader) -> str:
    data = bytearray()
    while chunk := await part.read_chunk(CHUNK_BYTES):
        data += chunk
        if len(data) > MAX_TEXT_BYTES:
            raise UploadRefused(f"the field {part.name!r} is longer than {MAX_TEXT_BYTES} bytes")
    return data.decode("utf-8", "replace")


def _digest(stream: BinaryIO, function: str) -> str:
    digest = hashlib.new(function, usedforsecurity=False)
    while chunk := stream.read(CHUNK_BYTES):
        digest.update(chunk)
    stream.seek(0)
    return digest.hexdigest()


def target_path(directory: str, subfolder: str, filename: str) -> Path:
    """Where an upload goes; raises UploadRefused for names outside or unusable."""
    try:
        path = resolve_below(directory, os.path.normpath(subfolder) if subfolder else "", filename)
    except PathRefused as error:
        raise UploadRefused(str(error)) from error
    if path == Path(os.path.realpath(directory)) or path.is_dir():
        raise UploadRefused(f"{filename!r} is a folder, not a file name")
    return path


def store(stream: BinaryIO, path: Path, overwrite: bool, hashing: str) -> Path:
    """Writes an upload and returns its path, which may carry a number.

    An existing file of equal content is reused; one of other content is kept and ` (1)`, ` (2)`...
    is put before the suffix of the new one.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UploadRefused("a part of the subfolder is a file, not a folder") from error
    with _naming:
        if not overwrite:
            free = _free_or_equal(stream, path, hashing)
            if free.exists():
                return free
            path = free
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".upload-")
        try:
            with os.fdopen(handle, "wb") as target:
                shutil.copyfileobj(stream, target, CHUNK_BYTES)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    return path


def _free_or_equal(stream: BinaryIO, path: Path, hashing: str) -> Path:
    own: str | None = None
    size_bytes = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    for number in itertools.count():
        name = f"{path.stem} ({number}){path.suffix}" if number else path.name
        candidate = path.with_name(name)
        if not candidate.exists():
            return candidate
        if candidate.is_file() and candidate.stat().st_size == size_bytes:
            own = own or _digest(stream, hashing)
            with candidate.open("rb") as existing:
                if _digest(existing, hashing) == own:
                    return candidate
    raise AssertionError("count() never ends")


def apply_mask(original: Path, upload: BinaryIO) -> io.BytesIO:
    """The original picture with the alpha of the uploaded one, as PNG with its texts kept.

    Raises:
        ImageRefused: one of the two is no readable picture, or too large.
    """
    with open_image(upload, "the mask") as mask:
        try:
            alpha = mask.convert("RGBA").getchannel("A")
        except (OSError, ValueError, SyntaxError) as error:
            raise ImageRefused(f"the mask is damaged: {error}") from error
    with open_image(original, original.name) as picture:
        try:
            texts = PngInfo()
            for key, value in getattr(picture, "text", {}).items():
                texts.add_text(key, value)
            result = picture.convert("RGBA")
            if alpha.size != result.size:
                alpha = alpha.resize(result.size)
            result.putalpha(alpha)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ImageRefused(f"the mask cannot be applied: {error}") from error
    buffer = io.BytesIO()
    result.save(buffer, format="PNG", compress_level=4, pnginfo=texts)
    buffer.seek(0)
    return buffer
