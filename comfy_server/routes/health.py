"""For machines that watch the server: `/healthz`, `/readyz`, `/metrics`."""

from __future__ import annotations

import asyncio

from aiohttp import web

from comfy_server.describe import PLAIN, TEXT, describe, shape
from comfy_server.metrics import CONTENT_TYPE
from comfy_server.services import SERVER, SERVICES
from comfy_server.strict_json import json_response

routes = web.RouteTableDef()


@routes.get("/healthz")
@describe(shape({"status": TEXT}))
async def get_health(_: web.Request) -> web.Response:
    """The process answers."""
    return json_response({"status": "ok"})


@routes.get("/readyz")
@describe(shape({"status": TEXT}), answers={503: shape({"status": TEXT, "reason": TEXT})})
async def get_readiness(request: web.Request) -> web.Response:
    """Prompts can be taken and run; 503 with the reason otherwise."""
    services = request.app[SERVICES]
    reason = services.ready()
    if reason is None and services.validate is None:
        reason = "nodes are still loading"
    if reason is not None:
        return json_response({"status": "not ready", "reason": reason}, status=503)
    return json_response({"status": "ready"})


@routes.get("/metrics")
@describe(PLAIN)
async def get_metrics(request: web.Request) -> web.Response:
    """Figures in Prometheus' text form."""
    page = await asyncio.to_thread(request.app[SERVER].metrics.page)
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE})
