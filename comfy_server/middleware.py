"""What happens to every request and answer, outermost first.

cache headers · compression · security headers and CORS · the gate · errors.
"""

from __future__ import annotations

import errno
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from comfy_server.gate import Gate, is_loopback
from comfy_server.options import ServerOptions
from comfy_server.paths import PathRefused
from comfy_server.quota import OverQuota
from comfy_server.services import ACCOUNT
from comfy_server.strict_json import BadJson, error_response
from comfy_server.users import UnknownUserError

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".ppm",
    ".bmp",
    ".pgm",
    ".tif",
    ".tiff",
    ".webp",
)
FORM_OVERHEAD_BYTES = 1024 * 1024  # what a form may hold beside a file of the largest size
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
ONE_DAY = "public, max-age=86400"
ONE_HOUR = "public, max-age=3600"
NO_CACHE = "no-cache"

CONFINED_PAGE = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self' data:; frame-src 'self'; object-src 'self';"
)


def cache_control(path: str, status: int) -> str | None:
    """The Cache-Control of an answer whose handler set none; None adds nothing."""
    if path.endswith((".js", ".css")) or (
        path.endswith(".json") and path.rpartition("/")[2].startswith("index")
    ):
        return NO_CACHE
    if not path.lower().endswith(IMAGE_SUFFIXES):
        return None
    if 200 <= status <= 206 or status in (301, 308):
        return ONE_DAY
    if status == 404:
        return ONE_HOUR
    return NO_CACHE if status in (302, 303, 307) else None


@web.middleware
async def cache_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells browsers what they may keep; no cache between may keep what one user was given."""
    response = await handler(request)
    if response.prepared:
        return response
    given = response.headers.get("Cache-Control")
    value = cache_control(request.path, response.status) if given is None else given
    if request.get(ACCOUNT) is not None:
        value = "private" if value is None else value.replace("public", "private")
    if value is not None:
        response.headers["Cache-Control"] = value
    return response


@web.middleware
async def compress(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Compresses JSON and plain text for clients that accept gzip."""
    response = await handler(request)
    compressible = response.content_type in ("application/json", "text/plain")
    encoded = "Content-Encoding" in response.headers
    if (
        isinstance(response, web.Response)
        and compressible
        and not encoded
        and response.body
        and "gzip" in request.headers.get("Accept-Encoding", "")
    ):
        response.enable_compression(web.ContentCoding.gzip)
    return response


def page_headers(options: ServerOptions) -> Middleware:
    """Security headers, the CSP of a confined page, and CORS headers when that is on."""
    added = {"X-Content-Type-Options": "nosniff", "Server": "latentloom"}
    if options.confine_page:
        added["Content-Security-Policy"] = CONFINED_PAGE
    if options.cors_origin is not None:
        added |= {
            "Access-Control-Allow-Origin": options.cors_origin,
            "Access-Control-Allow-Methods": "POST, GET, DELETE, PUT, OPTIONS, PATCH",
            "Access-Control-Allow-Headers": "Content-Type, Authorization",
            "Access-Control-Allow-Credentials": "true",
        }
    else:
        added["X-Frame-Options"] = "SAMEORIGIN"

    @web.middleware
    async def add_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        if not response.prepared:
            for name, value in added.items():
                response.headers.setdefault(name, value)
        return response

    return add_headers


def gate(options: ServerOptions) -> Middleware:
    """Refuses requests of foreign pages and for foreign names; answers OPTIONS itself."""
    checker = Gate(
        loopback_only=all(is_loopback(address) for address in options.listen),
        allowed_hosts=options.allowed_hosts,
        cors_origin=options.cors_origin,
    )

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = checker.refusal(request.headers, request.method, request.path)
        if refusal is not None:
            logger.warning("refused %s %s: %s", request.method, ascii(request.path), ascii(refusal))
            return web.Response(status=403, text=refusal)
        if request.method == "OPTIONS":
            return web.Response()
        return await handler(request)

    return check


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns exceptions into answers; nothing else in the server does."""
    limit = request.client_max_size
    try:
        if limit and (request.content_length or 0) > limit + FORM_OVERHEAD_BYTES:
            raise web.HTTPRequestEntityTooLarge(limit, request.content_length or 0)
        return await handler(request)
    except web.HTTPRequestEntityTooLarge:
        return web.Response(status=413, text=f"Maximum request body size {limit} exceeded.")
    except web.HTTPException as answer:
        return _plain(answer)
    except HttpProcessingError as error:  # a body that breaks off or is framed wrongly
        return error_response(400, error.message[:200])
    except BadJson as error:
        return error_response(400, str(error))
    except PathRefused as error:
        return error_response(403 if error.outside else 400, str(error))
    except OverQuota as error:
        return error_response(507, str(error.strerror))
    except UnknownUserError as error:
        return error_response(401, str(error.args[0]))
    except ConnectionResetError:
        raise  # the client has gone; there is nobody to answer
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            return error_response(507, f"the server's disk is full: {error.strerror}")
        if isinstance(error, OSError) and error.errno in FORBIDDEN:
            logger.error("%s %s: %s", request.method, ascii(request.path), error)
            return error_response(
                500,
                f"the server may not use its own files: {error.strerror}; its log names the file "
                "whose permissions are to be mended",
            )
        logger.exception("%s %s failed", request.method, ascii(request.path))
        return web.Response(status=500, text="500: Internal Server Error")


def _plain(answer: web.HTTPException) -> web.Response:
    """The same answer as a plain response, which later middleware may still change."""
    headers: Any = {
        name: value
        for name, value in answer.headers.items()
        if name not in ("Content-Type", "Content-Length")
    }
    if answer.empty_body:
        return web.Response(status=answer.status, headers=headers)
    return web.Response(status=answer.status, text=answer.text, headers=headers)
