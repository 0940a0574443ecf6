"""Logging in and out, on servers with authentication: `/login`, `/logout`."""

from __future__ import annotations

import asyncio
import html
import logging

from aiohttp import web

from comfy_server.accounts import SESSION_S
from comfy_server.auth import COOKIE, STORE
from comfy_server.describe import BINARY, EMPTY, TEXT, describe, ref, shape
from comfy_server.rates import RateLimit
from comfy_server.services import OPTIONS, USERS
from comfy_server.strict_json import BadJson, error_response, json_response, read_object

logger = logging.getLogger(__name__)

routes = web.RouteTableDef()

ATTEMPTS_PER_MINUTE = 10
ATTEMPTS: web.AppKey[RateLimit] = web.AppKey("login_attempts", RateLimit)
MAX_FIELD = 512
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'; "
    "base-uri 'none'"
)
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Log in</title>
<meta name="viewport" content="width=device-width">
<style>
 body {{ font: 16px system-ui, sans-serif; background: #1b1b1f; color: #eee; display: grid;
        place-items: center; min-height: 100vh; margin: 0 }}
 form {{ display: grid; gap: .8em; width: 20em }}
 label {{ display: grid; gap: .3em }}
 input, button {{ font: inherit; padding: .6em; border-radius: .4em; border: 1px solid #555;
                 background: #26262b; color: inherit }}
 button {{ background: #3564d4; border: 0; cursor: pointer }}
 p {{ color: #ff9a8a; margin: 0; min-height: 1.3em }}
</style></head><body>
<form method="post" action="/login">
 <h1>latentloom</h1>
 <label>Name <input name="name" autocomplete="username" autofocus required></label>
 <label>Token <input name="token" type="password" autocomplete="current-password" required></label>
 <input type="hidden" name="next" value="{next}">
 <p role="alert">{message}</p>
 <button>Log in</button>
</form></body></html>
"""


def _page(target: str, message: str = "", status: int = 200) -> web.Response:
    text = PAGE.format(next=html.escape(target, quote=True), message=html.escape(message))
    headers = {"Content-Security-Policy": PAGE_POLICY, "Cache-Control": "no-store"}
    return web.Response(text=text, status=status, content_type="text/html", headers=headers)


def _local(target: str) -> str:
    """The path to go to after logging in: ours, or the page."""
    is_local = target.startswith("/") and not target.startswith(("//", "/\\", "/login"))
    return target if is_local and target.isprintable() else "/"


@routes.get("/login")
@describe(BINARY, query={"next": TEXT}, answers={303: EMPTY})
async def show_page(request: web.Request) -> web.StreamResponse:
    """The login page; on a server without authentication, the way back."""
    if STORE not in request.app:
        return web.Response(status=303, headers={"Location": "/"})
    return _page(_local(request.query.get("next", "/")))


async def _fields(request: web.Request) -> tuple[dict[str, str], bool]:
    """What was sent, and whether it came from the page."""
    if request.content_type == "application/x-www-form-urlencoded":
        form = await request.post()
        return {key: str(value)[:MAX_FIELD] for key, value in form.items()}, True
    body = await read_object(request)
    return {key: value[:MAX_FIELD] for key, value in body.items() if isinstance(value, str)}, False


@routes.post("/login")
@describe(
    shape({"name": TEXT, "role": TEXT}),
    body=shape({"name": TEXT, "token": TEXT}, next=TEXT),
    answers={303: EMPTY, 400: ref("Error")},
)
async def log_in(request: web.Request) -> web.StreamResponse:
    """Checks name and token and starts a session."""
    if STORE not in request.app:
        raise BadJson("this server has no accounts; start it with --auth")
    fields, from_page = await _fields(request)
    target = _local(fields.get("next", "/"))
    wait_s = request.app[ATTEMPTS].take(request.remote or "")
    if wait_s is not None:
        message = f"too many attempts; wait {max(1, round(wait_s))} s"
        return _page(target, message, 429) if from_page else error_response(429, message)
    store, name = request.app[STORE], fields.get("name", "")
    account = await asyncio.to_thread(store.by_token, fields.get("token", ""), name)
    if account is None or not name:
        logger.warning("a login as %r from %s failed", name[:64], request.remote)
        message = "name and token do not belong together"
        return _page(target, message, 401) if from_page else error_response(401, message)
    key = await asyncio.to_thread(store.open_session, account)
    await asyncio.to_thread(request.app[USERS].furnish, account.name)
    response: web.Response
    if from_page:
        response = web.Response(status=303, headers={"Location": target})
    else:
        response = json_response({"name": account.name, "role": account.role})
    secure = request.app[OPTIONS].tls or request.headers.get("X-Forwarded-Proto") == "https"
    response.set_cookie(
        COOKIE, key, max_age=int(SESSION_S), httponly=True, samesite="Lax", secure=secure, path="/"
    )
    return response


@routes.post("/logout")
@describe(EMPTY, status=303)
async def log_out(request: web.Request) -> web.StreamResponse:
    """Ends the session."""
    key = request.cookies.get(COOKIE)
    if key and STORE in request.app:
        await asyncio.to_thread(request.app[STORE].close_session, key)
    response = web.Response(status=303, headers={"Location": "/login"})
    response.del_cookie(COOKIE, path="/")
    return response
