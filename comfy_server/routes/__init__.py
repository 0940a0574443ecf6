"""All routes: one module per resource, one table, in lookup order."""

from __future__ import annotations

from aiohttp import web

from comfy_server.routes import (
    extensions,
    frontend,
    health,
    history,
    internal,
    jobs,
    login,
    models,
    object_info,
    prompt,
    queue,
    queue_order,
    settings,
    socket,
    system,
    templates,
    upload,
    userdata,
    users,
    validation,
    view,
)

ALL_ROUTES: tuple[web.RouteTableDef, ...] = (
    internal.routes,
    jobs.routes,
    login.routes,
    health.routes,
    socket.routes,
    prompt.routes,
    queue.routes,
    queue_order.routes,
    validation.routes,
    history.routes,
    object_info.routes,
    view.routes,
    upload.routes,
    models.routes,
    users.routes,
    settings.routes,
    userdata.routes,
    system.routes,
    extensions.routes,
    templates.routes,
    frontend.index_routes,
)
# matched last, and without twins
FALLBACK_ROUTES: tuple[web.RouteTableDef, ...] = (frontend.file_routes,)
