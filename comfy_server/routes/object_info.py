"""What nodes there are: `/object_info`, `/node_replacements`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

import folder_paths
from comfy_server.describe import EMPTY, OBJECT, describe
from comfy_server.services import SERVICES, Services
from comfy_server.strict_json import dumps, json_response

logger = logging.getLogger(__name__)

routes = web.RouteTableDef()

KEPT_S, FRESH_S = 600.0, 30.0
REFRESH_AFTER_S = 0.1
LONGEST_START_S = 2.0  # a pack that takes longer to list its nodes does not hold the start up
BURST_S = 0.004  # the longest that nodes are asked without a look at other requests
GZIP_LEVEL = 4  # a page load waits for this: speed before size
GZIP_WINDOW = 31  # zlib's number for "gzip header and trailer"


@dataclass(frozen=True)
class Listing:
    """The encoded answer, and what it was made from."""

    body: bytes
    packed: bytes
    tag: str
    made_at: float
    stamp: tuple[object, ...]


@dataclass
class Listings:
    """The listings that are kept, by input folder, and the task that makes one ahead of need."""

    by_folder: dict[str, Listing] = field(default_factory=dict)
    warming: asyncio.Task[None] | None = None


LISTINGS: web.AppKey[Listings] = web.AppKey("listings", Listings)


def _entry(services: Services, name: str) -> dict[str, Any] | None:
    try:
        return services.node_info(name)
    except Exception:  # one broken pack must not empty the editor's node list
        logger.exception("the node %s cannot describe itself and is left out", name)
        return None


def _stamp(services: Services) -> tuple[object, ...]:
    """Changes when nodes come or go, or when a file is added to a model or the input folder."""
    folder = folder_paths.get_input_directory()
    changed = os.stat(folder).st_mtime_ns if os.path.isdir(folder) else 0
    return tuple(services.node_names()), changed, folder_paths.listing_stamp()


async def _parts(services: Services) -> AsyncIterator[bytes]:
    """The JSON of all nodes, piece by piece; other requests go on meanwhile."""
    entries: list[str] = []
    opening, pause_at = "{", time.perf_counter() + BURST_S
    with folder_paths.cached_filename_lists():
        for name in list(services.node_names()):
            entry = _entry(services, name)
            if entry is not None:
                entries.append(f"{dumps(name)}:{dumps(entry)}")
            if entries and time.perf_counter() > pause_at:
                yield (opening + ",".join(entries)).encode("ascii")
                await asyncio.sleep(0)
                entries, opening, pause_at = [], ",", time.perf_counter() + BURST_S
    rest = opening + ",".join(entries) if entries or opening == "{" else ""
    yield (rest + "}").encode("ascii")


async def _encode(services: Services) -> Listing:
    """Asks every node."""
    started = time.monotonic()
    body = b"".join([part async for part in _parts(services)])
    return await _seal(services, body, started)


async def _seal(services: Services, body: bytes, started: float) -> Listing:
    stamp = _stamp(services)  # only now are all categories listed that it looks at
    packed = await asyncio.to_thread(_pack, body)
    tag = hashlib.blake2b(body, digest_size=16).hexdigest()
    return Listing(body, packed, tag, started, stamp)


async def _kept_parts(app: web.Application) -> AsyncIterator[bytes]:
    """As `_parts`; once all are taken, they are the listing that others get."""
    services, folder = app[SERVICES], folder_paths.get_input_directory()
    started = time.monotonic()
    made = []
    async for part in _parts(services):
        made.append(part)
        yield part
    app[LISTINGS].by_folder[folder] = await _seal(services, b"".join(made), started)


def _pack(body: bytes) -> bytes:
    packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW)
    return packer.compress(body) + packer.flush()


async def _packed(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Compresses pieces so that each can be read when it has come."""
    packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW)
    async for part in parts:
        yield packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH)
    yield packer.flush()


async def _listing(app: web.Application) -> Listing:
    """The listing, encoded anew when a node or a file has come or gone.

    It is at most `KEPT_S` old; after `FRESH_S` the next one is made once the asker is answered.
    """
    services, listings = app[SERVICES], app[LISTINGS]
    folder = folder_paths.get_input_directory()  # with accounts, each user's own
    if folder not in listings.by_folder and listings.warming is not None:
        await asyncio.wait([listings.warming])  # the server has just been started
    known = listings.by_folder.get(folder)
    age_s = time.monotonic() - known.made_at if known is not None else math.inf
    if known is None or age_s > KEPT_S or known.stamp != _stamp(services):
        known = listings.by_folder[folder] = await _encode(services)
    elif age_s > FRESH_S:
        warm(app, REFRESH_AFTER_S)
    return known


async def make_ready(app: web.Application) -> None:
    """Makes the first listing, before anybody is told that the server is there."""
    warm(app, 0.0)
    task = app[LISTINGS].warming
    if task is not None:
        await asyncio.wait([task], timeout=LONGEST_START_S)


def warm(app: web.Application, after_s: float) -> None:
    """Has the listing made soon, so that the next who asks need not wait for it."""
    listings = app[LISTINGS]

    async def make() -> None:
        await asyncio.sleep(after_s)
        folder = folder_paths.get_input_directory()
        listings.by_folder[folder] = await _encode(app[SERVICES])

    if listings.warming is None or listings.warming.done():
        listings.warming = asyncio.get_running_loop().create_task(make())


def _takes_gzip(request: web.Request) -> bool:
    return "gzip" in request.headers.get("Accept-Encoding", "")


def _fresh(request: web.Request) -> web.Response:
    """An answer that is made while it is sent: every node is asked, and the first leave at once."""
    headers = {"Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    parts = _kept_parts(request.app)
    if _takes_gzip(request):
        parts, headers["Content-Encoding"] = _packed(parts), "gzip"
    return web.Response(
        body=parts, headers={**headers, "Content-Type": "application/json; charset=utf-8"}
    )


@routes.get("/object_info")
@describe(OBJECT, answers={304: EMPTY})
async def get_all(request: web.Request) -> web.Response:
    """The definition of every node.

    Who wants nothing kept ("no-cache", as the editor does because options of packs' nodes may
    depend on anything) gets a fresh one, without a tag.
    """
    wants_fresh = "no-cache" in request.headers.get("Cache-Control", "")
    if wants_fresh and "If-None-Match" not in request.headers:
        return _fresh(request)
    if wants_fresh:
        request.app[LISTINGS].by_folder.pop(folder_paths.get_input_directory(), None)
    listing = await _listing(request.app)
    headers = {
        "ETag": f'"{listing.tag}"',
        "Cache-Control": "no-cache",
        "Vary": "Accept-Encoding",
    }
    if any(etag.value == listing.tag for etag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    body = listing.body
    if _takes_gzip(request):
        body, headers["Content-Encoding"] = listing.packed, "gzip"
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
