"""The editor's own files: `/` and everything no other route knows."""

from __future__ import annotations

from aiohttp import web

from comfy_server.describe import BINARY, EMPTY, PLAIN, describe
from comfy_server.files import absent_file, trusted_file
from comfy_server.services import PACKS

index_routes = web.RouteTableDef()
file_routes = web.RouteTableDef()

NEVER_KEEP = {"Cache-Control": "no-store, must-revalidate", "Pragma": "no-cache", "Expires": "0"}
NO_PAGE = (
    "The editor is not installed. Install the package comfyui-frontend-package, or start with "
    "--front-end-root PATH. The HTTP API works without it."
)


@index_routes.get("/user-select")
@describe(EMPTY, status=302)
async def get_user_selection(_: web.Request) -> web.Response:
    """A path of the page's own, seen here when it is loaded again: the page finds its way back.

    Sent as it is the page would look for its files below this path.
    """
    return web.Response(status=302, headers={"Location": "/"})


@index_routes.get("/")
@describe(BINARY, answers={404: PLAIN})
async def get_index(request: web.Request) -> web.StreamResponse:
    """The editor's page."""
    index = request.app[PACKS].frontend_file("index.html")
    if index is None:
        return web.Response(status=404, text=NO_PAGE)
    return trusted_file(index, NEVER_KEEP)


@file_routes.get("/{path:.*}")
@describe(BINARY, hidden=True)
async def get_file(request: web.Request) -> web.StreamResponse:
    """A file of the editor; folders are not listed."""
    packs, path = request.app[PACKS], request.match_info["path"]
    found = packs.frontend_file(path)
    if found is not None:
        return trusted_file(found)
    return web.Response(status=403) if packs.is_frontend_folder(path) else absent_file(path)
