"""Routes for the page itself, only bare: `/internal/*`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

import folder_paths
from comfy_server.describe import EMPTY, OBJECT, TEXT, TEXTS, describe, ref, shape
from comfy_server.services import LOGS, SERVER
from comfy_server.strict_json import error_response, json_response, read_object

routes = web.RouteTableDef()


@routes.get("/internal/logs")
@describe(TEXT)
async def get_logs(request: web.Request) -> web.Response:
    """The recent terminal output as one text."""
    entries = request.app[LOGS].entries()
    return json_response("".join(f"{entry['t']} - {entry['m']}" for entry in entries))


@routes.get("/internal/logs/raw")
@describe(shape({"entries": {"type": "array"}, "size": OBJECT}))
async def get_raw_logs(request: web.Request) -> web.Response:
    """The recent terminal output write by write."""
    logs = request.app[LOGS]
    return json_response({"entries": logs.entries(), "size": logs.terminal_size()})


@routes.patch("/internal/logs/subscribe")
@describe(
    EMPTY,
    body=shape({"clientId": TEXT, "enabled": {"type": "boolean"}}),
    answers={400: ref("Error")},
)
async def subscribe_logs(request: web.Request) -> web.Response:
    """Starts or stops `logs` frames to one socket."""
    body = await read_object(request)
    client = request.app[SERVER].hub.clients.get(str(body.get("clientId")))
    if client is not None:
        client.wants_logs = bool(body.get("enabled"))
    return web.Response()


@routes.get("/internal/folder_paths")
@describe({"type": "object", "additionalProperties": TEXTS})
async def get_folder_paths(_: web.Request) -> web.Response:
    """Every model folder and its directories."""
    rows = folder_paths.folder_names_and_paths.items()
    return json_response({name: list(row[0]) for name, row in rows})


def _newest_first(directory: str) -> list[str]:
    if not Path(directory).is_dir():
        return []
    files = [
        entry
        for entry in Path(directory).iterdir()
        if entry.is_file() and not entry.name.startswith(".")
    ]
    return [entry.name for entry in sorted(files, key=lambda e: -e.stat().st_mtime)]


@routes.get("/internal/files/{directory_type}")
@describe(
    TEXTS,
    path={"directory_type": {"enum": ["input", "output", "temp"]}},
    answers={400: ref("Error")},
)
async def get_files(request: web.Request) -> web.Response:
    """File names at the top of input, output or temp."""
    kind = request.match_info["directory_type"]
    directory = folder_paths.get_directory_by_type(kind)
    if directory is None:
        return error_response(400, f"unknown type {kind[:40]!r}; known: input, output, temp")
    return json_response(await asyncio.to_thread(_newest_first, directory))
