"""Beyond the public contract: holding, resuming and reordering the queue, `/api/queue/...`."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from aiohttp import web

from comfy_execution.queue import PromptQueue
from comfy_server.auth import is_admin
from comfy_server.describe import TEXT, TEXTS, describe, ref, shape
from comfy_server.routes.queue import id_list
from comfy_server.services import SERVICES
from comfy_server.strict_json import BadJson, error_response, json_response, read_object

routes = web.RouteTableDef()

NUMBER = {"type": "number"}
STATE = shape({"paused": {"type": "boolean"}, "running": TEXTS, "pending": TEXTS})


def _state(queue: PromptQueue) -> web.Response:
    running, pending = queue.get_current_queue()
    return json_response(
        {
            "paused": queue.paused,
            "running": [item[1] for item in running],
            "pending": [item[1] for item in pending],
        }
    )


def _admin_queue(request: web.Request) -> PromptQueue:
    """The queue, for somebody who may change it for everybody.

    Raises:
        HTTPForbidden: the asker may not.
    """
    if not is_admin(request):
        raise web.HTTPForbidden(text="only an administrator may change the queue for everybody")
    return request.app[SERVICES].queue


@routes.get("/api/queue/state")
@describe(STATE)
async def get_state(request: web.Request) -> web.Response:
    """Whether the queue is paused, and the ids that run and wait, in order."""
    return _state(_admin_queue(request))


@routes.post("/api/queue/pause")
@describe(STATE)
async def post_pause(request: web.Request) -> web.Response:
    """Holds back waiting prompts; what runs goes on."""
    queue = _admin_queue(request)
    queue.pause()
    return _state(queue)


@routes.post("/api/queue/resume")
@describe(STATE)
async def post_resume(request: web.Request) -> web.Response:
    """Lets waiting prompts run again."""
    queue = _admin_queue(request)
    queue.resume()
    return _state(queue)


@routes.post("/api/queue/clear")
@describe(STATE)
async def post_clear(request: web.Request) -> web.Response:
    """Takes out every waiting prompt."""
    queue = _admin_queue(request)
    await asyncio.to_thread(queue.wipe_queue)
    return _state(queue)


@routes.post("/api/queue/reorder")
@describe(STATE, body=shape({"prompt_ids": TEXTS}), answers={400: ref("Error")})
async def post_reorder(request: web.Request) -> web.Response:
    """Puts the named prompts first, in this order; the rest keep theirs."""
    queue = _admin_queue(request)
    body = await read_object(request)
    await asyncio.to_thread(queue.reorder, id_list(body, "prompt_ids"))
    return _state(queue)


@routes.post("/api/queue/priority")
@describe(
    STATE,
    body=shape({"prompt_id": TEXT, "number": NUMBER}),
    answers={400: ref("Error"), 404: ref("Error"), 409: ref("Error")},
)
async def post_priority(request: web.Request) -> web.Response:
    """Gives a waiting prompt another position value; smaller runs first."""
    queue = _admin_queue(request)
    body = await read_object(request)
    prompt_id = str(body.get("prompt_id"))
    if await asyncio.to_thread(queue.set_number, prompt_id, _number(body)):
        return _state(queue)
    if queue.is_running(prompt_id) or prompt_id in queue.history:
        return error_response(409, f"prompt {prompt_id} waits no longer: it runs or has ended")
    return error_response(404, f"there is no prompt {prompt_id}")


def _number(body: dict[str, Any]) -> float:
    value = body.get("number")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadJson("number must be a finite number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadJson("number must be a finite number")
    return number
