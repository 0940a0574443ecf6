"""Whose prompts somebody may see and control: all, or with authentication their own.

A prompt carries its owner in `extra_data["user_id"]`, written when it is accepted and never taken
from the body. Admins, and everybody on a server without authentication, see all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from comfy_execution.queue import PromptQueue
from comfy_server.auth import is_admin, owner_of
from comfy_server.strict_json import dumps

OWNER_KEY = "user_id"

Item = Sequence[Any]


def owner_of_item(item: Item) -> str | None:
    """The user a queue item belongs to."""
    owner = item[3].get(OWNER_KEY)
    return owner if isinstance(owner, str) else None


def sees_item(request: web.Request) -> Callable[[Item], bool]:
    """A test for queue items."""
    if is_admin(request):
        return lambda _: True
    owner = owner_of(request)
    return lambda item: owner_of_item(item) == owner


def visible_queue(request: web.Request, queue: PromptQueue) -> tuple[list[Item], list[Item]]:
    """Running and pending items the asker may see."""
    sees = sees_item(request)
    running, pending = queue.get_current_queue()
    return [item for item in running if sees(item)], [item for item in pending if sees(item)]


def finished_jobs(request: web.Request, queue: PromptQueue) -> list[dict[str, Any]]:
    """Job records of finished prompts the asker may see, oldest first; read-only."""
    with queue.mutex:
        records = queue.history.jobs()
    if is_admin(request):
        return records
    owner = owner_of(request)
    return [job for job in records if job.get(OWNER_KEY) == owner]


def visible_ids(
    request: web.Request, queue: PromptQueue, max_items: int | None, offset: int | None
) -> list[str]:
    """Ids of a page of the history the asker may see; see `PromptQueue.get_history`."""
    if is_admin(request):
        with queue.mutex:
            return queue.history.page(max_items, -1 if offset is None else offset)
    ids = [str(job["id"]) for job in finished_jobs(request, queue)]
    if offset is not None and offset >= 0:
        return ids[offset:][:max_items]
    return ids if max_items is None else ids[max(0, len(ids) - max_items) :]


def finished_entry(request: web.Request, queue: PromptQueue, prompt_id: str) -> dict[str, Any]:
    """`{id: entry}` of one finished prompt, empty if there is none the asker may see."""
    found = queue.history.read([prompt_id])
    sees = sees_item(request)
    return {name: entry for name, entry in found.items() if sees(entry["prompt"])}


def finished_json(request: web.Request, queue: PromptQueue, prompt_id: str) -> bytes:
    """As `finished_entry`, as JSON and where possible without parsing."""
    if is_admin(request):
        return queue.history.read_json([prompt_id], max_bytes=0)
    return dumps(finished_entry(request, queue, prompt_id)).encode()


def controls(request: web.Request, queue: PromptQueue, prompt_id: str) -> bool:
    """Whether the asker may stop, remove or forget this prompt."""
    if is_admin(request):
        return True
    running, pending = visible_queue(request, queue)
    if any(item[1] == prompt_id for item in (*running, *pending)):
        return True
    return bool(finished_entry(request, queue, prompt_id))
