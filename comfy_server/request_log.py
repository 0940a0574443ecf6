"""One line for each request: who, what, how it ended, which prompt."""

from __future__ import annotations

import logging
import time

from aiohttp import web
from aiohttp.typedefs import Handler

from comfy_server.services import PROMPT_ID, USER

logger = logging.getLogger(__name__)

READING = frozenset({"GET", "HEAD", "OPTIONS"})


def _level(method: str, status: int) -> int:
    """Errors of ours are loud, changes are seen, reading is for those who debug."""
    if status >= 500:
        return logging.ERROR
    return logging.DEBUG if method in READING else logging.INFO


@web.middleware
async def log_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Logs method, path (without query: it may hold secrets), status, time, user and prompt."""
    started = time.perf_counter()
    status = 500
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        level = _level(request.method, status)
        if logger.isEnabledFor(level):
            logger.log(
                level,
                "%s %s %d %.1f ms user=%s from=%s prompt=%s",
                request.method,
                ascii(request.path)[1:-1],
                status,
                (time.perf_counter() - started) * 1000,
                request.get(USER, "-"),
                request.remote,
                request.get(PROMPT_ID, "-"),
            )
