"""What nodes there are: `/object_info`, `/node_replacements`."""
from __future__ import annotations

import hashlib
import logging
import zlib
from typing import Any

from aiohttp import web

import folder_paths
from comfy_server.describe import EMPTY, OBJECT, describe
from comfy_server.services import SERVICES, Services
from comfy_server.strict_json import dumps, json_response

logger = logging.getLogger(__name__)

routes = web.RouteTableDef()

GZIP_LEVEL = 4  # a page load waits for this: speed before size
GZIP_WINDOW = 31  # zlib's number for "gzip header and trailer"


def _entry(services: Services, name: str) -> dict[str, Any] | None:
    try:
        return services.node_info(name)
    except Exception:  # one broken pack must not empty the editor's node list
        logger.exception("the node %s cannot describe itself and is left out", name)
        return None


@routes.get("/object_info")
@describe(OBJECT, answers={304: EMPTY})
async def get_all(request: web.Request) -> web.Response:
    """The definition of every node."""
    services = request.app[SERVICES]
    parts = []
    with folder_paths.cached_filename_lists():
        for name in list(services.node_names()):
            entry = _entry(services, name)
            if entry is not None:
                parts.append(f"{dumps(name)}:{dumps(entry)}")
    body = ("{" + ",".join(parts) + "}").encode("ascii")
    return _conditional(request, body)


def _conditional(request: web.Request, body: bytes) -> web.Response:
    """An answer with ETag, compressed if the client likes it, empty if it has it."""
    tag = hashlib.blake2b(body, digest_size=16).hexdigest()
    headers = {"ETag": f'"{tag}"', "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if any(etag.value == tag for etag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW)
        body = packer.compress(body) + packer.flush()
        headers["Content-Encoding"] = "gzip"
    return web.Response(
        body=body, headers=headers, content_type="application/json", charset="utf-8"
    )


@routes.get("/object_info/{node_class}")
@describe(OBJECT)
async def get_one(request: web.Request) -> web.Response:
    """The definition of one node, or an empty object."""
    services, name = request.app[SERVICES], request.match_info["node_class"]
    if name not in set(services.node_names()):
        return json_response({})
    entry = _entry(services, name)
    return json_response({} if entry is None else {name: entry})


@routes.get("/node_replacements")
@describe(OBJECT)
async def get_replacements(request: web.Request) -> web.Response:
    """Old node names and what takes their place."""
    return json_response(dict(request.app[SERVICES].node_replacements()))
