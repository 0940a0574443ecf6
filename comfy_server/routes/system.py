"""The machine and what the server can do: `/system_stats`, `/features`."""

from __future__ import annotations

import asyncio
import sys
from functools import cache
from importlib import metadata
from typing import Any

from aiohttp import web

from comfy_server.describe import OBJECT, OBJECTS, describe, shape
from comfy_server.openapi import document
from comfy_server.services import OPTIONS, SERVER, SERVICES
from comfy_server.strict_json import json_response

# The version of the public interface that is spoken here. The editor marks core nodes with it, and
# clients compare it with the one they need.
INTERFACE_VERSION = "0.8.0"
TEMPLATES = "comfyui-workflow-templates-core"

routes = web.RouteTableDef()


@cache
def _version_of(distribution: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@routes.get("/system_stats")
@describe(shape({"system": OBJECT, "devices": OBJECTS}))
async def get_stats(request: web.Request) -> web.Response:
    """Versions, memory and devices."""
    options = request.app[OPTIONS]
    given = await asyncio.to_thread(request.app[SERVICES].system_stats)
    system: dict[str, Any] = {
        "os": sys.platform,
        "ram_total": 0,
        "ram_free": 0,
        "comfyui_version": INTERFACE_VERSION,
        "latentloom_version": options.version,
        "required_frontend_version": None,
        "installed_templates_version": _version_of(TEMPLATES),
        "required_templates_version": _version_of(TEMPLATES),
        "python_version": sys.version,
        "pytorch_version": None,
        "embedded_python": False,
        "argv": list(options.argv),
    }
    system |= given.get("system", {})
    others = {"workers": given["workers"]} if "workers" in given else {}
    return json_response({"system": system, "devices": given.get("devices", []), **others})


@routes.get("/memory")
@describe(shape({"models": OBJECTS, "devices": OBJECTS}))
async def get_memory(request: web.Request) -> web.Response:
    """Who holds what where, in bytes: loaded models with device, number type and state."""
    services = request.app[SERVICES]
    stats = await asyncio.to_thread(services.system_stats)
    return json_response({"models": services.memory(), "devices": stats.get("devices", [])})


@routes.get("/features")
@describe(OBJECT)
async def get_features(request: web.Request) -> web.Response:
    """What the server offers."""
    return json_response(request.app[SERVER].get_feature_flags())


@routes.get("/api/openapi.json")
@describe(OBJECT)
async def get_document(request: web.Request) -> web.Response:
    """This interface as an OpenAPI document."""
    return json_response(document(request.app, request.app[OPTIONS].version))
