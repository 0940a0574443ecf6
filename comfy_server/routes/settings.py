"""A user's settings: `/settings`."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from comfy_server.auth import bounded_user
from comfy_server.describe import ANYTHING, EMPTY, OBJECT, describe, ref
from comfy_server.services import SERVER, USERS
from comfy_server.strict_json import BadJson, json_response, read_json, read_object
from comfy_server.users import PROTOTYPE

routes = web.RouteTableDef()


@routes.get("/settings")
@describe(OBJECT)
async def get_all(request: web.Request) -> web.Response:
    """Every stored setting."""
    users = request.app[USERS]
    return json_response(users.read_settings(users.get_request_user_id(request)))


@routes.get("/settings/{id}")
@describe(ANYTHING)
async def get_one(request: web.Request) -> web.Response:
    """One setting, or null."""
    users = request.app[USERS]
    settings = users.read_settings(users.get_request_user_id(request))
    return json_response(settings.get(request.match_info["id"]))


async def _merge(request: web.Request, changes: dict[str, Any]) -> web.Response:
    if PROTOTYPE in changes:
        raise BadJson(f"a setting must not be called {PROTOTYPE}")
    users = request.app[USERS]
    user_id = users.get_request_user_id(request)
    quota, size_bytes = request.app[SERVER].quota, len(await request.read())
    await asyncio.to_thread(quota.take, bounded_user(request), size_bytes)
    await asyncio.to_thread(users.merge_settings, user_id, changes)
    return web.Response()


@routes.post("/settings")
@describe(EMPTY, body=OBJECT, answers={400: ref("Error"), 507: ref("Error")})
async def post_all(request: web.Request) -> web.Response:
    """Stores several settings."""
    return await _merge(request, await read_object(request))


@routes.post("/settings/{id}")
@describe(EMPTY, body=ANYTHING, answers={400: ref("Error"), 507: ref("Error")})
async def post_one(request: web.Request) -> web.Response:
    """Stores one setting; the body is its value."""
    return await _merge(request, {request.match_info["id"]: await read_json(request)})
