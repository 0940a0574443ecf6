"""Pictures and other results: `/view`."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

import folder_paths
from comfy_server.describe import BINARY, EMPTY, TEXT, describe, ref
from comfy_server.files import safe_headers, stranger_file
from comfy_server.images import ImageRefused, channel_png, decode, parse_preview, preview_image
from comfy_server.paths import PathRefused, resolve_below
from comfy_server.strict_json import error_response

routes = web.RouteTableDef()


class _NotServed(Exception):
    """Carries the answer for a name that leads to no file."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _locate(request: web.Request) -> Path:
    """The file a query names.

    Raises:
        _NotServed: the name is not acceptable (400), leads outside (403) or names no file (404).
    """
    if "filename" not in request.query:
        raise _NotServed(404, "filename is missing")
    filename, directory = folder_paths.annotated_filepath(request.query["filename"])
    kind = request.query.get("type", "output")
    directory = directory or folder_paths.get_directory_by_type(kind)
    if directory is None:
        raise _NotServed(400, f"unknown type {kind[:40]!r}; known: output, input, temp")
    name = filename.replace("\\", "/")
    if not name or name.startswith("/") or ".." in name.split("/"):
        raise _NotServed(400, "filename must be a plain file name")
    try:
        path = resolve_below(directory, request.query.get("subfolder", ""), name.rpartition("/")[2])
    except PathRefused as error:
        raise _NotServed(403 if error.outside else 400, str(error)) from error
    if not path.is_file():
        raise _NotServed(404, "no such file")
    return path


@routes.get("/view")
@describe(
    BINARY,
    query={
        "filename!": TEXT,
        "type": {"enum": ["output", "input", "temp"]},
        "subfolder": TEXT,
        "preview": TEXT,
        "channel": {"enum": ["rgb", "a", "rgba"]},
    },
    answers={206: BINARY, 304: EMPTY, 400: ref("Error"), 404: ref("Error"), 415: ref("Error")},
)
async def view(request: web.Request) -> web.StreamResponse:
    """A file from output, input or temp: as it is, as a smaller preview, or one channel of it."""
    try:
        path = _locate(request)
    except _NotServed as error:
        return error_response(error.status, str(error))
    preview, channel = request.query.get("preview"), request.query.get("channel")
    if preview is None and channel not in ("rgb", "a"):
        return stranger_file(path, request)
    try:
        if preview is not None:
            wanted = parse_preview(preview, channel)
            body, mime = await decode(request, preview_image, path, wanted)
        else:
            body, mime = await decode(request, channel_png, path, channel == "a"), "image/png"
    except ImageRefused as error:
        if preview is not None and not error.too_large:
            return stranger_file(path, request)
        return error_response(415, str(error))
    return web.Response(body=body, headers=safe_headers(path.name, mime, request))
