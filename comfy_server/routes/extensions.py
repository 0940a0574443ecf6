"""What packs add to the page: `/extensions`, `/i18n`, `/global_subgraphs`."""

from __future__ import annotations

import asyncio

from aiohttp import web

from comfy_server.describe import BINARY, EMPTY, OBJECT, TEXTS, describe
from comfy_server.files import trusted_file
from comfy_server.services import PACKS
from comfy_server.strict_json import json_response

routes = web.RouteTableDef()


@routes.get("/extensions")
@describe(TEXTS)
async def get_scripts(request: web.Request) -> web.Response:
    """URL paths of every script the page loads."""
    return json_response(await asyncio.to_thread(request.app[PACKS].script_urls))


@routes.get("/extensions/{pack}/{path:.*}")
@describe(BINARY, answers={404: EMPTY})
async def get_file(request: web.Request) -> web.StreamResponse:
    """A file of a pack's web folder, or of the editor's own extensions."""
    packs = request.app[PACKS]
    pack, path = request.match_info["pack"], request.match_info["path"]
    found = packs.extension_file(pack, path)
    if found is None and packs.frontend_root is not None:
        found = packs.frontend_file(f"extensions/{pack}/{path}")
    return web.Response(status=404) if found is None else trusted_file(found)


@routes.get("/i18n")
@describe(OBJECT)
async def get_translations(request: web.Request) -> web.Response:
    """Texts of packs by language."""
    return json_response(await asyncio.to_thread(request.app[PACKS].translations))


@routes.get("/global_subgraphs")
@describe(OBJECT)
async def get_subgraphs(request: web.Request) -> web.Response:
    """Blueprints that packs bring, without their content."""
    found = await asyncio.to_thread(request.app[PACKS].subgraphs)
    return json_response({name: entry for name, (entry, _) in found.items()})


@routes.get("/global_subgraphs/{id}")
@describe({"type": ["object", "null"]})
async def get_subgraph(request: web.Request) -> web.Response:
    """One blueprint with its content as JSON text, or null."""
    found = await asyncio.to_thread(request.app[PACKS].subgraphs)
    known = found.get(request.match_info["id"])
    if known is None:
        return json_response(None)
    entry, path = known
    return json_response({**entry, "data": path.read_text(encoding="utf-8")})
