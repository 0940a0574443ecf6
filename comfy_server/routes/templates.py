"""Examples and help: `/workflow_templates`, `/templates`, `/docs`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from comfy_server.describe import BINARY, EMPTY, TEXTS, describe
from comfy_server.files import trusted_file
from comfy_server.services import PACKS
from comfy_server.strict_json import json_response

routes = web.RouteTableDef()


def _file_or_404(path: Path | None) -> web.StreamResponse:
    return web.Response(status=404) if path is None else trusted_file(path)


@routes.get("/workflow_templates")
@describe({"type": "object", "additionalProperties": TEXTS})
async def get_workflows(request: web.Request) -> web.Response:
    """Names of packs' example workflows."""
    return json_response(await asyncio.to_thread(request.app[PACKS].workflow_templates))


@routes.get("/api/workflow_templates/{pack}/{path:.*}")
@describe(BINARY, answers={404: EMPTY})
async def get_workflow(request: web.Request) -> web.StreamResponse:
    """An example workflow of a pack, or its thumbnail."""
    pack, path = request.match_info["pack"], request.match_info["path"]
    return _file_or_404(request.app[PACKS].workflow_template_file(pack, path))


@routes.get("/templates/{path:.*}")
@describe(BINARY, answers={404: EMPTY})
async def get_template(request: web.Request) -> web.StreamResponse:
    """A file of the installed template packages."""
    return _file_or_404(request.app[PACKS].template_file(request.match_info["path"]))


@routes.get("/docs/{path:.*}")
@describe(BINARY, answers={404: EMPTY})
async def get_help(request: web.Request) -> web.StreamResponse:
    """A page of node help."""
    return _file_or_404(request.app[PACKS].help_file(request.match_info["path"]))
