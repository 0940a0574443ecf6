"""Builds the aiohttp application and gives every route its twin under `/api`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Middleware

from comfy_server import auth, metrics, middleware
from comfy_server.completions import COMPLETIONS, Completions
from comfy_server.connections import CONNECTIONS, Connections, most_connections
from comfy_server.images import DECODERS, MOST_DECODED_AT_ONCE
from comfy_server.rates import RateLimit
from comfy_server.request_log import log_requests
from comfy_server.routes import ALL_ROUTES, FALLBACK_ROUTES, login, object_info
from comfy_server.services import LOGS, OPTIONS, PACKS, SERVER, SERVICES, USERS

if TYPE_CHECKING:
    from comfy_server.prompt_server import PromptServer

API_PREFIX = "/api"
ONLY_BARE = ("/internal/", "/templates/", "/docs/", "/extensions/", f"{API_PREFIX}/")


def build_application(server: PromptServer) -> web.Application:
    """An application without routes: packs add theirs before `add_routes` is called."""
    options = server.options
    connections = Connections(most_connections())
    layers: list[Middleware] = [
        connections.note,
        metrics.measure(lambda: server.metrics),
        log_requests(),
        middleware.cache_headers,
    ]
    if options.compress:
        layers.append(middleware.compress)
    layers += [middleware.page_headers(options), middleware.gate(options), middleware.errors]
    store = auth.account_store() if options.auth else None
    if store is not None:
        layers.append(auth.authentication(store))
    limit = auth.rate_limit(options)
    if limit is not None:
        layers.append(limit)
    app = web.Application(client_max_size=options.max_upload_bytes, middlewares=layers)
    if store is not None:
        app[auth.STORE] = store
    app[login.ATTEMPTS] = RateLimit(login.ATTEMPTS_PER_MINUTE)
    app[CONNECTIONS] = connections
    app[DECODERS] = ThreadPoolExecutor(MOST_DECODED_AT_ONCE, thread_name_prefix="picture")
    app[OPTIONS] = options
    app[object_info.LISTINGS] = object_info.Listings()
    app[SERVER] = server
    app[SERVICES] = server.services
    app[COMPLETIONS] = Completions(server.loop, server.services.queue)
    app[USERS] = server.user_manager
    app[PACKS] = server.packs
    app[LOGS] = server.logs
    app.on_shutdown.append(lambda _: server.hub.close())
    app.on_cleanup.append(_stop_decoders)
    return app


async def _stop_decoders(app: web.Application) -> None:
    app[DECODERS].shutdown(wait=False, cancel_futures=True)


def add_routes(server: PromptServer) -> None:
    """Adds our routes and those of packs, their twins, and last the editor's files.

    Routes that packs added to `app` or its router directly get twins too. Ours come first: a pack
    cannot take over a path of the contract.
    """
    app = server.app
    for table in (*ALL_ROUTES, server.routes):
        app.add_routes(table)
    _add_twins(app)
    for table in FALLBACK_ROUTES:
        app.add_routes(table)


def _add_twins(app: web.Application) -> None:
    known = {(route.method, _path(route)) for route in app.router.routes()}
    for route in list(app.router.routes()):
        path = _path(route)
        if path is None or path.startswith(ONLY_BARE) or route.method == "HEAD":
            continue
        twin = API_PREFIX + path
        if (route.method, twin) in known or isinstance(route.resource, web.StaticResource):
            continue
        if route.method == "GET":
            app.router.add_get(twin, route.handler)
        else:
            app.router.add_route(route.method, twin, route.handler)


def _path(route: web.AbstractRoute) -> str | None:
    """The path as it was registered, patterns included; None for sub-applications."""
    if route.resource is None:
        return None
    # aiohttp shows only the name of a pattern; its text is kept under this name
    return str(getattr(route.resource, "_orig_path", route.resource.canonical))
