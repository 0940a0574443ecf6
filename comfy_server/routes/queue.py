"""The queue and what stops it: `/queue`, `/interrupt`, `/free`.

What changes the queue is done in a thread: it is written to the journal, and a disk may be slow.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from comfy_server.auth import is_admin
from comfy_server.describe import EMPTY, TEXT, TEXTS, describe, ref, shape
from comfy_server.ownership import sees_item, visible_queue
from comfy_server.services import SERVICES
from comfy_server.strict_json import BadJson, read_object

routes = web.RouteTableDef()

ITEMS = {"type": "array", "items": ref("QueueItem")}
FEW = 200  # prompts; to list more takes a thread, while others are served


def id_list(body: dict[str, Any], name: str) -> list[str]:
    """A list of ids from a body; empty when the key is absent.

    Raises:
        BadJson: the value is not a list of texts or numbers.
    """
    ids = body.get(name)
    if ids is None:
        return []
    if not isinstance(ids, list) or not all(isinstance(value, (str, int)) for value in ids):
        raise BadJson(f"{name} must be a list of prompt ids")
    return [str(value) for value in ids]


@routes.get("/queue")
@describe(shape({"queue_running": ITEMS, "queue_pending": ITEMS}))
async def get_queue(request: web.Request) -> web.Response:
    """What runs and what waits, in the order it will run."""
    queue, sees = request.app[SERVICES].queue, sees_item(request)
    if queue.get_tasks_remaining() > FEW:
        body = await asyncio.to_thread(queue.read_json, sees)
    else:
        body = queue.read_json(sees)
    return web.Response(body=body, content_type="application/json", charset="utf-8")


@routes.post("/queue")
@describe(
    EMPTY, body=shape({}, clear={"type": "boolean"}, delete=TEXTS), answers={400: ref("Error")}
)
async def post_queue(request: web.Request) -> web.Response:
    """Empties the queue, or takes out some prompts."""
    queue = request.app[SERVICES].queue
    body = await read_object(request)
    unwanted = set(id_list(body, "delete"))
    sees = sees_item(request)
    if body.get("clear") and is_admin(request):
        await asyncio.to_thread(queue.wipe_queue)
    elif body.get("clear"):
        unwanted |= {item[1] for item in visible_queue(request, queue)[1]}
    await asyncio.to_thread(queue.delete_items, unwanted, sees)
    return web.Response()


@routes.post("/interrupt")
@describe(EMPTY, body=shape({}, prompt_id=TEXT), body_required=False)
async def post_interrupt(request: web.Request) -> web.Response:
    """Stops what runs, or only the named prompt if it is the one that runs."""
    try:
        body = await read_object(request)
    except BadJson:
        body = {}  # the public contract: a missing or malformed body means "whatever runs"
    prompt_id = body.get("prompt_id")
    queue = request.app[SERVICES].queue
    if is_admin(request):
        await asyncio.to_thread(queue.interrupt, str(prompt_id) if prompt_id else None)
        return web.Response()
    for item in visible_queue(request, queue)[0]:
        if not prompt_id or item[1] == prompt_id:
            await asyncio.to_thread(queue.interrupt, item[1])
    return web.Response()


@routes.post("/free")
@describe(
    EMPTY,
    body=shape({}, unload_models={"type": "boolean"}, free_memory={"type": "boolean"}),
    answers={400: ref("Error")},
)
async def post_free(request: web.Request) -> web.Response:
    """Asks the worker to unload models and drop results after the current prompt."""
    queue = request.app[SERVICES].queue
    body = await read_object(request)
    if body.get("unload_models"):
        queue.set_flag("unload_models", True)
    if body.get("free_memory"):
        queue.set_flag("free_memory", True)
    return web.Response()
