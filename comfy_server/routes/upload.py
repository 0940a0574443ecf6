"""Receiving files: `/upload/image` (any kind of file), `/upload/mask`."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from aiohttp import web

import folder_paths
from comfy_server import uploads
from comfy_server.auth import bounded_user
from comfy_server.describe import TEXT, describe, ref, shape
from comfy_server.images import ImageRefused, decode
from comfy_server.paths import PathRefused, resolve_below
from comfy_server.services import OPTIONS, SERVER
from comfy_server.strict_json import error_response, json_response
from comfy_server.uploads import UploadForm, UploadRefused

routes = web.RouteTableDef()

FORM = {
    "multipart": shape(
        {"image": {"type": "string", "format": "binary"}},
        type=TEXT,
        subfolder=TEXT,
        overwrite=TEXT,
        original_ref=TEXT,
    )
}


def _directory(kind: str) -> str:
    directory = folder_paths.get_directory_by_type(kind)
    if directory is None:
        raise UploadRefused(f"unknown type {kind[:40]!r}; known: input, temp, output")
    return directory


async def _store(request: web.Request, form: UploadForm, content: BinaryIO) -> web.Response:
    kind = form.texts.get("type", "input")
    directory = _directory(kind)
    subfolder = form.texts.get("subfolder", "")
    target = uploads.target_path(directory, subfolder, form.filename)
    size_bytes = content.seek(0, os.SEEK_END)
    content.seek(0)
    quota = request.app[SERVER].quota
    await asyncio.to_thread(quota.take, bounded_user(request), size_bytes)
    overwrite = form.texts.get("overwrite") in ("true", "1")
    hashing = request.app[OPTIONS].hashing_function
    stored = await asyncio.to_thread(uploads.store, content, target, overwrite, hashing)
    relative = stored.relative_to(Path(directory).resolve()).as_posix()
    folder, _, name = relative.rpartition("/")
    return json_response({"name": name, "subfolder": folder, "type": kind})


@routes.post("/upload/image")
@describe(ref("Stored"), body=FORM, answers={400: ref("Error"), 507: ref("Error")})
async def upload_image(request: web.Request) -> web.Response:
    """Stores a file in input, temp or output; the answer holds the name it got."""
    try:
        form = await uploads.read_form(request)
    except UploadRefused as error:
        return error_response(error.status, str(error))
    try:
        assert form.file is not None  # read_form refuses a form without
        return await _store(request, form, form.file)
    except UploadRefused as error:
        return error_response(error.status, str(error))
    finally:
        form.close()


def _original(form: UploadForm) -> Path:
    try:
        reference: Any = json.loads(form.texts.get("original_ref", ""))
    except (ValueError, RecursionError) as error:
        raise UploadRefused("original_ref must be JSON: {filename, subfolder?, type?}") from error
    if not isinstance(reference, dict) or not isinstance(reference.get("filename"), str):
        raise UploadRefused("original_ref must name a file: {filename, subfolder?, type?}")
    filename, directory = folder_paths.annotated_filepath(reference["filename"])
    directory = directory or _directory(str(reference.get("type") or "output"))
    try:
        path = resolve_below(directory, str(reference.get("subfolder") or ""), filename)
    except PathRefused as error:
        raise UploadRefused(str(error), 403 if error.outside else 400) from error
    if not path.is_file():
        raise UploadRefused(f"the original {filename!r} does not exist", 404)
    return path


@routes.post("/upload/mask")
@describe(
    ref("Stored"), body=FORM, answers={status: ref("Error") for status in (400, 403, 404, 507)}
)
async def upload_mask(request: web.Request) -> web.Response:
    """Stores a copy of an existing picture that has the alpha channel of the uploaded one."""
    try:
        form = await uploads.read_form(request)
    except UploadRefused as error:
        return error_response(error.status, str(error))
    try:
        assert form.file is not None  # read_form refuses a form without
        masked = await decode(request, uploads.apply_mask, _original(form), form.file)
        return await _store(request, form, masked)
    except UploadRefused as error:
        return error_response(error.status, str(error))
    except ImageRefused as error:
        return error_response(400, str(error))
    finally:
        form.close()
