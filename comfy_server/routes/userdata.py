"""A user's files: `/userdata`, `/v2/userdata`.

A file's name is one path segment of the URL, its slashes as `%2F`. Names that arrive encoded twice
are decoded once more.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import unquote

from aiohttp import web

from comfy_server import user_files
from comfy_server.auth import bounded_user
from comfy_server.describe import BINARY, EMPTY, FLAG, OBJECTS, PLAIN, TEXT, describe, ref
from comfy_server.files import absent_file, stranger_file, trusted_file
from comfy_server.paths import PathRefused, resolve_below
from comfy_server.services import SERVER, USERS
from comfy_server.strict_json import error_response, json_response
from comfy_server.user_files import Listing, write_atomically
from comfy_server.users import UnknownUserError

routes = web.RouteTableDef()

STORED = {"anyOf": [TEXT, ref("FileInfo")]}
STYLE_SHEET = "user.css"  # the one file of a user that the page may apply to itself


def _root(request: web.Request) -> Path:
    """The user's folder with its own links resolved, so that paths below compare."""
    return request.app[USERS].request_folder(request).resolve()


def _is_on(request: web.Request, name: str, default: str = "") -> bool:
    return request.query.get(name, default).lower() == "true"


def _named(request: web.Request, root: Path, part: str) -> Path:
    name = request.match_info[part]
    name = unquote(name) if "%" in name else name
    path = resolve_below(root, name)
    if path == root or not name.strip():
        raise PathRefused("the file name is empty")
    return path


def _answer(request: web.Request, path: Path, root: Path) -> web.Response:
    if _is_on(request, "full_info"):
        return json_response(user_files.file_info(path, root))
    return json_response(path.relative_to(root).as_posix())


@routes.get("/userdata")
@describe(
    {"type": "array"},
    answers={400: PLAIN, 404: PLAIN},
    query={"dir!": TEXT, "recurse": FLAG, "full_info": FLAG, "split": FLAG},
)
async def list_files(request: web.Request) -> web.Response:
    """The files of one folder."""
    directory = request.query.get("dir", "")
    if not directory:
        return web.Response(status=400, text="Directory not provided")
    folder = resolve_below(_root(request), directory)
    if not folder.is_dir():
        return web.Response(status=404, text="Directory not found")
    flags = [_is_on(request, name) for name in ("recurse", "full_info", "split")]
    how = Listing(*flags)
    return json_response(await asyncio.to_thread(user_files.list_folder, folder, how))


@routes.get("/v2/userdata")
@describe(OBJECTS, query={"path": TEXT}, answers={400: ref("Error"), 404: ref("Error")})
async def list_tree(request: web.Request) -> web.Response:
    """Everything below a folder, folders included."""
    try:
        root = _root(request)
    except UnknownUserError as error:  # the public contract: 401 elsewhere, 403 here
        return error_response(403, str(error.args[0]))
    if not root.is_dir():
        return json_response([])
    try:
        folder = resolve_below(root, unquote(request.query.get("path", "")))
    except PathRefused as error:
        return error_response(400, str(error))
    if not folder.exists():
        return error_response(404, "no such folder")
    if not folder.is_dir():
        return error_response(400, "path names a file, not a folder")
    return json_response(await asyncio.to_thread(user_files.tree, folder, root))


@routes.get("/userdata/{file}")
@describe(BINARY, answers={400: ref("Error"), 404: EMPTY})
async def get_file(request: web.Request) -> web.StreamResponse:
    """A file's content."""
    root = _root(request)
    path = _named(request, root, "file")
    if not path.is_file():
        return absent_file(path)
    if path == root / STYLE_SHEET:
        return trusted_file(path)
    return stranger_file(path, request)


@routes.post("/userdata/{file}")
@describe(
    STORED,
    query={"overwrite": FLAG, "full_info": FLAG},
    body=BINARY,
    body_required=False,
    answers={400: ref("Error"), 409: PLAIN, 507: ref("Error")},
)
async def post_file(request: web.Request) -> web.Response:
    """Stores the body as a file."""
    root = _root(request)
    path = _named(request, root, "file")
    if path.is_dir():
        return error_response(400, "the name belongs to a folder")
    if not _is_on(request, "overwrite", "true") and path.exists():
        return web.Response(status=409, text="File already exists")
    body = await request.read()
    quota = request.app[SERVER].quota
    await asyncio.to_thread(quota.take, bounded_user(request), len(body))
    try:
        await asyncio.to_thread(write_atomically, path, body)
    except (NotADirectoryError, FileExistsError) as error:
        raise PathRefused("a part of the path is a file, not a folder") from error
    return _answer(request, path, root)


@routes.delete("/userdata/{file}")
@describe(EMPTY, status=204, answers={400: ref("Error"), 404: EMPTY})
async def delete_file(request: web.Request) -> web.Response:
    """Removes a file."""
    path = _named(request, _root(request), "file")
    if not path.is_file():
        return web.Response(status=404)
    path.unlink()
    return web.Response(status=204)


@routes.post("/userdata/{file}/move/{dest}")
@describe(
    STORED,
    query={"overwrite": FLAG, "full_info": FLAG},
    answers={400: ref("Error"), 404: EMPTY, 409: PLAIN},
)
async def move_file(request: web.Request) -> web.Response:
    """Moves or renames a file."""
    root = _root(request)
    source, destination = _named(request, root, "file"), _named(request, root, "dest")
    if not source.is_file():
        return web.Response(status=404)
    if destination.is_dir():
        return error_response(400, "the destination is a folder")
    overwrite = _is_on(request, "overwrite", "true")
    if not user_files.move(source, destination, overwrite):
        return web.Response(status=409, text="File already exists")
    return _answer(request, destination, root)
