"""Authentication: every request but a few needs a token or a session; roles; rate limits.

Programs send `Authorization: Bearer <token>` (or Basic, with the user's name and token). People log
in on a page and get a session cookie, which scripts of the page cannot read and other sites cannot
use. A request's user is in `request[USER]` from here on, and folders are narrowed to the user's.
"""

from __future__ import annotations

import base64
import binascii
import logging
from pathlib import Path
from urllib.parse import quote

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

import folder_paths
from comfy_server.accounts import Account, AccountStore
from comfy_server.options import ServerOptions
from comfy_server.rates import RateLimit
from comfy_server.services import ACCOUNT, USER
from comfy_server.strict_json import error_response

logger = logging.getLogger(__name__)

COOKIE = "latentloom_session"
OPEN_PATHS = frozenset({"/login", "/logout", "/healthz", "/readyz"})
ADMIN_PATHS = frozenset(
    {
        ("GET", "/internal/logs"),
        ("GET", "/internal/logs/raw"),
        ("POST", "/users"),
        ("PATCH", "/internal/logs/subscribe"),
        ("POST", "/free"),
        ("GET", "/metrics"),
    }
)
ADMIN_PACKAGES = frozenset({"comfyui_manager"})
"""Packages whose routes install and remove programs."""

DEFAULT_PER_MINUTE = 3000
FAILURES_PER_MINUTE = 120  # a page left open asks on with the session that has ended
STORE_NAME = "accounts"

STORE: web.AppKey[AccountStore] = web.AppKey("accounts", AccountStore)


def account_store() -> AccountStore:
    """The accounts below the user directory, in a folder no route reaches."""
    folder = Path(folder_paths.get_system_user_directory(STORE_NAME))
    return AccountStore(folder / "accounts.json")


def add_account(spec: str) -> str:
    """Makes or renews the user `NAME[:ROLE]` and returns the token, to be shown once.

    Raises:
        AccountRefused: the name or the role is not acceptable.
    """
    return account_store().add(spec)[1]


def identify(request: web.Request, store: AccountStore) -> Account | None:
    """Who sends a request, from its header or its cookie."""
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return store.by_token(credentials.strip())
    if scheme.lower() == "basic":
        try:
            pair = base64.b64decode(credentials, validate=True).decode("utf-8")
        except (binascii.Error, ValueError):
            return None
        name, _, token = pair.partition(":")
        return store.by_token(token, name)
    session = request.cookies.get(COOKIE)
    return store.by_session(session) if session else None


def is_admin(request: web.Request) -> bool:
    """Whether the asker may see and control everything; true where nobody logs in."""
    account = request.get(ACCOUNT)
    return account is None or bool(account.is_admin)


def owner_of(request: web.Request) -> str | None:
    """The user a request's prompts and files belong to; None where nobody logs in."""
    account = request.get(ACCOUNT)
    return None if account is None else str(account.name)


def bounded_user(request: web.Request) -> str | None:
    """The user whose files are bounded in size, if the asker's are; see `quota`."""
    return None if is_admin(request) else owner_of(request)


def _route(request: web.Request) -> tuple[str, str]:
    """Method and path of the route that answers, without the prefix.

    The route counts, not how its path was written; HEAD is a GET whose body is left out.
    """
    resource = request.match_info.route.resource
    path = "" if resource is None else resource.canonical
    method = "GET" if request.method == "HEAD" else request.method
    return method, path.removeprefix("/api") if path.startswith("/api/") else path


def _installs_programs(request: web.Request) -> bool:
    handler = request.match_info.handler
    return str(getattr(handler, "__module__", "")).partition(".")[0] in ADMIN_PACKAGES


def _unauthenticated(request: web.Request) -> web.StreamResponse:
    wants_page = request.method == "GET" and (
        request.headers.get("Sec-Fetch-Dest") == "document"
        or "text/html" in request.headers.get("Accept", "")
    )
    if wants_page:
        target = quote(request.path_qs, safe="/?=&%")
        return web.Response(status=303, headers={"Location": f"/login?next={target}"})
    return error_response(
        401,
        "log in at /login, or send the header 'Authorization: Bearer <token>'",
        headers={"WWW-Authenticate": 'Bearer realm="latentloom"'},
    )


def _has_credentials(request: web.Request) -> bool:
    return "Authorization" in request.headers or COOKIE in request.cookies


def _too_many(wait_s: float) -> web.Response:
    seconds = max(1, round(wait_s))
    return error_response(
        429,
        f"too many requests with a token or session that is not valid; wait {seconds} s",
        headers={"Retry-After": str(seconds)},
    )


def authentication(store: AccountStore) -> Middleware:
    """Lets in only known users, and to some routes only admins."""
    failures = RateLimit(FAILURES_PER_MINUTE)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        route = _route(request)
        if route[1] in OPEN_PATHS:
            return await handler(request)
        account = identify(request, store)
        if account is None:
            wait_s = failures.take(request.remote or "") if _has_credentials(request) else None
            return _unauthenticated(request) if wait_s is None else _too_many(wait_s)
        if not account.is_admin and (route in ADMIN_PATHS or _installs_programs(request)):
            return error_response(403, "this needs the role admin")
        request[ACCOUNT] = account
        request[USER] = account.name
        with folder_paths.user_scope(None if account.is_admin else account.name):
            return await handler(request)

    return check


def rate_limit(options: ServerOptions) -> Middleware | None:
    """Refuses askers who send too many requests; None when nothing is limited.

    Files of the page are not counted: one page load asks for hundreds.
    """
    per_minute = options.requests_per_minute or (DEFAULT_PER_MINUTE if options.auth else 0)
    if per_minute <= 0:
        return None
    limit = RateLimit(per_minute)

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.route.resource is None or not _is_static(request):
            wait_s = limit.take(str(request.get(USER) or request.remote))
            if wait_s is not None:
                seconds = max(1, round(wait_s))
                return error_response(
                    429,
                    f"more than {per_minute} requests a minute; wait {seconds} s",
                    headers={"Retry-After": str(seconds)},
                )
        return await handler(request)

    return count


def _is_static(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    static = ("/{path}", "/extensions/{pack}/{path}", "/templates/{path}", "/docs/{path}", "/")
    return request.method == "GET" and resource is not None and resource.canonical in static
