"""Users: `/users`."""

from __future__ import annotations

from aiohttp import web

from comfy_server.describe import TEXT, describe, ref, shape
from comfy_server.services import OPTIONS, USERS
from comfy_server.strict_json import error_response, json_response, read_object
from comfy_server.users import DEFAULT_USER, UserNameRefused

routes = web.RouteTableDef()


@routes.get("/users")
@describe(shape({"storage": TEXT}))
async def get_users(request: web.Request) -> web.Response:
    """Who may be chosen; in single-user mode, whether a user folder exists."""
    users = request.app[USERS]
    if users.multi_user and not request.app[OPTIONS].auth:
        return json_response({"storage": "server", "users": users.users})
    asker = users.get_request_user_id(request) if request.app[OPTIONS].auth else DEFAULT_USER
    migrated = users.folder_of(asker).is_dir()
    return json_response({"storage": "server", "migrated": migrated})


@routes.post("/users")
@describe(TEXT, body=shape({"username": TEXT}), answers={400: ref("Error")})
async def post_user(request: web.Request) -> web.Response:
    """Adds a user; the answer is the new id."""
    name = (await read_object(request)).get("username")
    if not isinstance(name, str):
        return error_response(400, "username must be text")
    users = request.app[USERS]
    if not users.multi_user:
        return error_response(400, "this server has one user; start it with --multi-user")
    try:
        return json_response(users.add_user(name))
    except UserNameRefused as error:
        return error_response(400, str(error))
