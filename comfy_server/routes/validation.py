"""A dry run: `POST /validate` says what a prompt would do, and does nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from aiohttp import web

from comfy_server.describe import OBJECT, TEXTS, describe, ref, shape
from comfy_server.routes.prompt import PromptRefused, read_body, sort_out, validate_submitted
from comfy_server.services import SERVER, SERVICES
from comfy_server.strict_json import json_response

routes = web.RouteTableDef()

PLAN = shape({"cached": TEXTS, "would_run": TEXTS, "unneeded": TEXTS})
ANSWER = shape({"valid": {"type": "boolean"}, "outputs": TEXTS, "node_errors": OBJECT}, plan=PLAN)


@routes.post("/validate")
@describe(
    ANSWER,
    body=ref("PromptRequest"),
    answers={status: ref("PromptError") for status in (400, 413, 503)},
)
async def post_validate(request: web.Request) -> web.Response:
    """Validates a prompt; for a valid one also tells which nodes would run and which are known."""
    server, services = request.app[SERVER], request.app[SERVICES]
    try:
        body = await read_body(request)
        submitted = sort_out({**body, "number": 0}, server)  # a dry run takes no number
        valid, error, outputs, node_errors = await validate_submitted(services, submitted)
    except PromptRefused as refused:
        return json_response({"error": refused.error, "node_errors": {}}, refused.status)
    answer: dict[str, Any] = {
        "valid": valid,
        "error": error,
        "outputs": outputs,
        "node_errors": node_errors,
    }
    if valid and services.plan is not None:
        plan = await services.plan(submitted.prompt, outputs, submitted.extra_data)
        answer["plan"] = asdict(plan)
    return json_response(answer)
