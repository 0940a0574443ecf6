"""Examples and help: `/workflow_templates`, `/templates`, `/docs`."""

from __future__ import annotations

import asyncio

from aiohttp import web

from comfy_server.describe import BINARY, EMPTY, TEXTS, describe
from comfy_server.files import content_type, trusted_file
from comfy_server.services import PACKS, SERVICES
from comfy_server.strict_json import json_response
from comfy_server.template_list import INDEX

routes = web.RouteTableDef()


@routes.get("/workflow_templates")
@describe({"type": "object", "additionalProperties": TEXTS})
async def get_workflows(request: web.Request) -> web.Response:
    """Names of packs' example workflows."""
    return json_response(await asyncio.to_thread(request.app[PACKS].workflow_templates))


@routes.get("/api/workflow_templates/{pack}/{path:.*}")
@describe(BINARY, answers={404: EMPTY})
async def get_workflow(request: web.Request) -> web.StreamResponse:
    """An example workflow of a pack, or its thumbnail: a drawing of the graph if it has none."""
    pack, path = request.match_info["pack"], request.match_info["path"]
    packs = request.app[PACKS]
    found = packs.workflow_template_file(pack, path)
    if found is not None:
        return trusted_file(found)
    drawn = await asyncio.to_thread(packs.workflow_template_substitute, pack, path)
    if drawn is None:
        return web.Response(status=404)
    return web.Response(body=drawn, content_type=content_type(path))


@routes.get("/templates/{path:.*}")
@describe(BINARY, answers={404: EMPTY})
async def get_template(request: web.Request) -> web.StreamResponse:
    """A file of the installed template packages.

    An index names the templates whose nodes are all here. Where a picture is lacking, a substitute
    stands in.
    """
    packs, path = request.app[PACKS], request.match_info["path"]
    if INDEX.fullmatch(path):
        known = frozenset(request.app[SERVICES].node_names())
        index = await asyncio.to_thread(packs.template_index, path, known)
        if index is not None:
            return json_response(index)
    found = packs.template_file(path)
    if found is not None:
        return trusted_file(found)
    substitute = await asyncio.to_thread(packs.template_substitute, path)
    if substitute is None:
        return web.Response(status=404)
    content, kind = substitute
    return web.Response(body=content, content_type=kind)


@routes.get("/docs/{path:.*}")
@describe(BINARY, answers={404: EMPTY})
async def get_help(request: web.Request) -> web.StreamResponse:
    """A page of node help."""
    path = request.app[PACKS].help_file(request.match_info["path"])
    return web.Response(status=404) if path is None else trusted_file(path)
