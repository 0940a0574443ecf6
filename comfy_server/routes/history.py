"""Finished prompts: `/history`."""

from __future__ import annotations

import asyncio

from aiohttp import web

from comfy_execution.queue import PromptQueue
from comfy_server.auth import is_admin
from comfy_server.describe import EMPTY, INTEGER, TEXTS, describe, ref, shape
from comfy_server.ownership import finished_entry, finished_jobs, finished_json, visible_ids
from comfy_server.routes.queue import id_list
from comfy_server.services import SERVICES
from comfy_server.strict_json import BadJson, read_object

routes = web.RouteTableDef()

MAX_PAGE_BYTES = 64 * 1024 * 1024
COMPRESSED_FROM_BYTES = 16 * 1024
LARGE_BYTES = 64 * 1024  # compressed; a larger entry is read in a thread
ENTRIES = {"type": "object", "additionalProperties": ref("HistoryEntry")}


def query_integer(request: web.Request, name: str) -> int | None:
    """An integer from the query, None when absent; raises BadJson (answered with 400)."""
    text = request.query.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError as error:
        raise BadJson(f"{name} must be an integer, found {text[:40]!r}") from error


@routes.get("/history")
@describe(ENTRIES, query={"max_items": INTEGER, "offset": INTEGER}, answers={400: ref("Error")})
async def get_history(request: web.Request) -> web.Response:
    """A page of the history, oldest first; with `max_items` alone, the newest ones.

    A page that would be too long is cut, at the end if there is an `offset`, else at the beginning.
    """
    max_items, offset = query_integer(request, "max_items"), query_integer(request, "offset")
    queue = request.app[SERVICES].queue
    ids = visible_ids(request, queue, max_items, offset)
    is_from_end = offset is None or offset < 0
    body = await asyncio.to_thread(
        queue.history.read_json, ids, MAX_PAGE_BYTES, prefer_last=is_from_end
    )
    response = web.Response(
        body=body, content_type="application/json", charset="utf-8", zlib_executor_size=1024
    )
    if len(body) >= COMPRESSED_FROM_BYTES:
        response.enable_compression()  # if the asker takes it; a history is a tenth as long then
    return response


@routes.get("/history/{prompt_id}")
@describe(ENTRIES)
async def get_one(request: web.Request) -> web.Response:
    """One finished prompt, or an empty object: scripts poll this until the id appears."""
    queue, prompt_id = request.app[SERVICES].queue, request.match_info["prompt_id"]
    if queue.history.size_bytes(prompt_id) > LARGE_BYTES:
        body = await asyncio.to_thread(finished_json, request, queue, prompt_id)
    else:
        body = finished_json(request, queue, prompt_id)
    return web.Response(body=body, content_type="application/json", charset="utf-8")


@routes.post("/history")
@describe(
    EMPTY, body=shape({}, clear={"type": "boolean"}, delete=TEXTS), answers={400: ref("Error")}
)
async def post_history(request: web.Request) -> web.Response:
    """Forgets everything, or some prompts."""
    queue = request.app[SERVICES].queue
    body = await read_object(request)
    unwanted = id_list(body, "delete")
    if body.get("clear") and is_admin(request):
        await asyncio.to_thread(queue.wipe_history)
    elif body.get("clear"):
        unwanted += [str(job["id"]) for job in finished_jobs(request, queue)]
    await asyncio.to_thread(_forget, request, queue, unwanted)
    return web.Response()


def _forget(request: web.Request, queue: PromptQueue, prompt_ids: list[str]) -> None:
    """Deletes those of the prompts that are there and the asker's; takes a disk's time."""
    for prompt_id in dict.fromkeys(prompt_ids):
        if finished_entry(request, queue, prompt_id):
            queue.delete_history_item(prompt_id)
