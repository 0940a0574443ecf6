"""Submitting prompts: `GET` and `POST /prompt`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from comfy_execution.items import (
    SENSITIVE_EXTRA_DATA_KEYS,
    NotStoredError,
    Submission,
    SubmissionKind,
)
from comfy_execution.wire import json_kind
from comfy_server.auth import bounded_user, owner_of
from comfy_server.completions import COMPLETIONS
from comfy_server.describe import FLAG, describe, ref
from comfy_server.ownership import OWNER_KEY
from comfy_server.quota import OverQuota
from comfy_server.services import PROMPT_ID, SERVER, SERVICES, Services, resolve
from comfy_server.strict_json import BadJson, json_response, large_response, read_json

if TYPE_CHECKING:
    from comfy_server.prompt_server import PromptServer

logger = logging.getLogger(__name__)

routes = web.RouteTableDef()

MOST_WAITING = 100_000
ID_PATTERN = re.compile(r"[\w.:@+=-]{1,128}", re.ASCII)
IDS_AT_ONCE = 256
REPLY_LEAD_S = 0.01  # what a busy client needs to read the reply before the frames that follow


class PromptRefused(Exception):
    """A prompt that cannot be queued; carries the answer's `error` object."""

    def __init__(
        self, kind: str, message: str, details: str = "", status: int = 400, **extra_info: Any
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {
            "type": kind,
            "message": message,
            "details": details,
            "extra_info": extra_info,
        }


@dataclass
class Request:
    """A posted body, checked and sorted out."""

    prompt: dict[str, Any]
    prompt_id: str
    number: float
    extra_data: dict[str, Any]
    targets: list[str] | None


@routes.get("/prompt")
@describe(ref("QueueInfo"))
async def get_prompt(request: web.Request) -> web.Response:
    """How many prompts wait or run."""
    return json_response(request.app[SERVER].get_queue_info())


@routes.post("/prompt")
@describe(
    ref("PromptAccepted"),
    body=ref("PromptRequest"),
    query={"wait": FLAG},
    answers={status: ref("PromptError") for status in (400, 409, 410, 413, 503, 507)},
)
async def post_prompt(request: web.Request) -> web.Response:
    """Validates a prompt and puts it in the queue."""
    server, services = request.app[SERVER], request.app[SERVICES]
    try:
        body = await read_body(request)
        body = server.trigger_on_prompt(body)
        submitted = sort_out(body, server)
        request[PROMPT_ID] = submitted.prompt_id  # for the request log
        _claim(request, server, submitted)
        await _require_room(request, server)
        valid, error, outputs, node_errors = await validate_submitted(services, submitted)
        if not valid:
            return await large_response("node_errors", node_errors, {"error": error}, 400)
        with _reply_first(server, submitted):
            answer = _accepted(await _submit(server, submitted_item(submitted, outputs)))
        if _wants_result(request, body):
            answer["history"] = await _result(request, submitted.prompt_id)
    except PromptRefused as refused:
        return json_response({"error": refused.error, "node_errors": {}}, refused.status)
    return await large_response("node_errors", node_errors, answer)


@contextlib.contextmanager
def _reply_first(server: PromptServer, submitted: Request) -> Iterator[None]:
    """Keeps news of a prompt from overtaking the reply that names it.

    Published clients begin to listen when they have read the reply: a prompt that is known already
    would have ended by then, and they would wait for ever. That it has started is told at once.
    """
    client = server.hub.clients.get(str(submitted.extra_data.get("client_id")))
    if client is None:
        yield
        return
    client.outbox.hold()
    try:
        yield
    finally:
        server.loop.call_soon(client.outbox.let_start_pass)  # when the reply is written
        server.loop.call_later(REPLY_LEAD_S, client.outbox.release)


def _wants_result(request: web.Request, body: dict[str, Any]) -> bool:
    """Whether the answer is to come when the prompt has ended: `wait`, in the body or the query."""
    return body.get("wait") is True or request.query.get("wait") == "true"


async def _result(request: web.Request, prompt_id: str) -> dict[str, Any]:
    """The history entry of a prompt, once it has ended.

    Raises:
        PromptRefused: it was taken out of the queue meanwhile.
    """
    ended = await request.app[COMPLETIONS].wait(prompt_id)
    found = request.app[SERVICES].queue.get_history(prompt_id) if ended else {}
    if prompt_id not in found:
        raise PromptRefused(
            "prompt_removed", "The prompt was taken out of the queue", prompt_id, 410
        )
    entry: dict[str, Any] = found[prompt_id]
    return entry


async def read_body(request: web.Request) -> dict[str, Any]:
    try:
        body = await read_json(request)
    except BadJson as error:
        raise PromptRefused("invalid_json", "The request is not JSON", str(error)) from error
    if not isinstance(body, dict):
        raise PromptRefused(
            "invalid_json",
            "The request is not a JSON object",
            f'expected {{"prompt": {{...}}}}, found {json_kind(body)}',
        )
    return body


def sort_out(body: dict[str, Any], server: PromptServer) -> Request:
    """Checks everything about the body but the graph itself.

    Raises:
        PromptRefused: a field is missing or of the wrong kind.
    """
    number = _position(body, server)
    prompt = _graph(body, server.options.max_prompt_nodes)
    extra_data = _optional(body, "extra_data", dict, "an object") or {}
    extra_data = dict(extra_data)
    client_id = _optional(body, "client_id", str, "text")
    if client_id is not None:
        extra_data["client_id"] = client_id
    _optional(extra_data, "client_id", str, "text")
    targets = _optional(body, "partial_execution_targets", list, "a list of node ids")
    if targets is not None:
        targets = [str(target) for target in targets]
    return Request(prompt, _prompt_id(body), number, extra_data, targets)


def _claim(request: web.Request, server: PromptServer, submitted: Request) -> None:
    """Writes the owner into the prompt, and refuses to address another user's socket."""
    owner = owner_of(request)
    submitted.extra_data.pop(OWNER_KEY, None)
    if owner is None:
        return
    submitted.extra_data[OWNER_KEY] = owner
    client_id = submitted.extra_data.get("client_id")
    if client_id is not None and not server.hub.claim(str(client_id), owner):
        raise PromptRefused(
            "invalid_client_id", "The client id belongs to another user", "use an id of your own"
        )


async def _require_room(request: web.Request, server: PromptServer) -> None:
    """Refuses prompts while very many wait, and those of users whose folders are full."""
    if server.prompt_queue.get_tasks_remaining() >= MOST_WAITING:
        raise PromptRefused(
            "queue_full",
            "Too many prompts are waiting",
            f"{MOST_WAITING} prompts wait; post again when some have run, or clear the queue",
            503,
        )
    user = bounded_user(request)
    if user is None or server.quota.limit_bytes <= 0:
        return
    try:
        await asyncio.to_thread(server.quota.take, user)
    except OverQuota as error:
        message = "Your folders are full"
        raise PromptRefused("quota_exceeded", message, str(error.strerror), 507) from error


def _optional(body: dict[str, Any], name: str, kind: type, expected: str) -> Any:
    value = body.get(name)
    if value is not None and not isinstance(value, kind):
        raise PromptRefused(
            f"invalid_{name}",
            f"The field {name} is not {expected}",
            f"{name} must be {expected}, found {json_kind(value)}",
            input_name=name,
        )
    return value


def _position(body: dict[str, Any], server: PromptServer) -> float:
    """The place in the queue; without a wish, the running counter (negative: in front)."""
    wish = body.get("number")
    if wish is None:
        number = server.number
        server.number += 1
        return -number if body.get("front") else number
    try:
        position = float(wish)
    except (TypeError, ValueError, OverflowError):
        position = math.nan
    if not math.isfinite(position):
        raise PromptRefused("invalid_number", "The field number is not a number", str(wish)[:100])
    return position


def _prompt_id(body: dict[str, Any]) -> str:
    wish = body.get("prompt_id")
    if wish is None:
        return next(_IDS)
    if not isinstance(wish, str) or not ID_PATTERN.fullmatch(wish):
        raise PromptRefused(
            "invalid_prompt_id",
            "The field prompt_id is not acceptable",
            "use a UUID, or up to 128 letters, digits and . _ : @ + = -; or leave it out",
        )
    return wish


def _new_ids() -> Iterator[str]:
    """Random ids; the system is asked for many at once, since each call gives way to the worker."""
    while True:
        block = os.urandom(16 * IDS_AT_ONCE)
        for start in range(0, len(block), 16):
            yield str(uuid.UUID(bytes=block[start : start + 16], version=4))


_IDS = _new_ids()


def _graph(body: dict[str, Any], most_nodes: int) -> dict[str, Any]:
    if "prompt" not in body:
        raise _missing_prompt(body)
    prompt = body["prompt"]
    if not isinstance(prompt, dict):
        raise PromptRefused(
            "invalid_prompt",
            "The prompt is not an object",
            f"prompt must map node ids to nodes, found {json_kind(prompt)}",
        )
    if _is_editor_graph(prompt):
        raise _editor_graph_refused()
    if 0 < most_nodes < len(prompt):
        raise PromptRefused(
            "prompt_too_large",
            "The prompt has too many nodes",
            f"it has {len(prompt)} nodes and at most {most_nodes} are accepted; split it into "
            "several prompts, or start the server with a larger --max-prompt-nodes",
            413,
            node_count=len(prompt),
            max_prompt_nodes=most_nodes,
        )
    return prompt


def _is_editor_graph(value: dict[str, Any]) -> bool:
    return isinstance(value.get("nodes"), list) and isinstance(value.get("links"), list)


def _editor_graph_refused() -> PromptRefused:
    return PromptRefused(
        "invalid_prompt",
        "This is a workflow file of the editor, not a prompt",
        "the prompt maps node ids to {class_type, inputs}; in the editor use "
        "File > Export (API), and post that",
    )


def _missing_prompt(body: dict[str, Any]) -> PromptRefused:
    if _is_editor_graph(body):
        return _editor_graph_refused()
    nodes = [value for value in body.values() if isinstance(value, dict) and "class_type" in value]
    details = "No prompt provided"
    if nodes:
        details += '; the nodes stand at the top level: wrap them as {"prompt": {...}}'
    return PromptRefused("no_prompt", "No prompt provided", details)


async def validate_submitted(
    services: Services, submitted: Request
) -> tuple[bool, dict[str, Any] | None, list[str], dict[str, Any]]:
    if services.apply_replacements is not None:
        submitted.prompt = services.apply_replacements(submitted.prompt)
    if services.validate is None:
        raise PromptRefused(
            "not_ready", "The server is still loading its nodes", "try again in a moment", 503
        )
    valid, error, outputs, node_errors = await resolve(
        services.validate(submitted.prompt_id, submitted.prompt, submitted.targets)
    )
    return valid, error, outputs, node_errors


def submitted_item(submitted: Request, outputs: list[str]) -> tuple[Any, ...]:
    """The queue item: secrets apart, time of acceptance stamped."""
    extra = {**submitted.extra_data, "create_time": int(time.time() * 1000)}
    secrets = {key: extra.pop(key) for key in SENSITIVE_EXTRA_DATA_KEYS if key in extra}
    number, prompt_id = submitted.number, submitted.prompt_id
    return (number, prompt_id, submitted.prompt, extra, outputs, secrets)


async def _submit(server: PromptServer, item: tuple[Any, ...]) -> Submission:
    try:
        return await server.submit(item)
    except NotStoredError as error:
        kind, label = "not_stored", "The prompt could not be stored"
        raise PromptRefused(kind, label, str(error), 503) from error


def _accepted(submission: Submission) -> dict[str, Any]:
    """The answer for a prompt that is in the queue, now or from an earlier equal request."""
    if submission.kind is SubmissionKind.CONFLICT:
        raise PromptRefused(
            "prompt_id_in_use",
            "The prompt id belongs to another prompt",
            f"{submission.prompt_id} is taken; leave the field prompt_id out",
            409,
        )
    return {"prompt_id": submission.prompt_id, "number": submission.number}
