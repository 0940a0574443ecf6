"""One line for each request: who, what, how it ended, which prompt."""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from comfy_server.services import PROMPT_ID, USER

logger = logging.getLogger(__name__)

READING = frozenset({"GET", "HEAD", "OPTIONS"})
WIRE = logging.getLogger("comfy_server.wire")
"""What the HTTP library says about connections, before there is a request."""


def shorten(record: logging.LogRecord) -> bool:
    """One line instead of a traceback for what strangers send that is no request.

    Anybody may send it, as often as they like, and its lines hold what they chose.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg += ": %s: %s"
        reason = error.message.partition("\n")[0].partition(": ")[0].rstrip(":")
        record.args = (*_arguments(record), type(error).__name__, ascii(reason)[1:-1][:100])
    elif isinstance(error, ConnectionError):
        record.msg += ": it has gone"
    else:
        return True
    record.levelno, record.levelname = logging.INFO, "INFO"
    record.exc_info = record.exc_text = None
    return True


def _arguments(record: logging.LogRecord) -> tuple[object, ...]:
    return record.args if isinstance(record.args, tuple) else ()


def _level(method: str, status: int) -> int:
    """Errors of ours are loud, changes are seen, reading is for those who debug."""
    if status >= 500:
        return logging.ERROR
    return logging.DEBUG if method in READING else logging.INFO


class RequestLog:
    """Collects the lines of requests that end in the same turn of the event loop.

    They are written together: each write gives the interpreter away, and under load getting it
    back takes longer than the request.
    """

    def __init__(self) -> None:
        self._lines: dict[int, list[str]] = {}

    def note(self, level: int, line: str) -> None:
        """Takes a line; it is written when the loop has done what is ready now."""
        if not self._lines:
            asyncio.get_running_loop().call_soon(self.write)
        self._lines.setdefault(level, []).append(line)

    def write(self) -> None:
        """Writes what was taken, the loudest last."""
        lines, self._lines = self._lines, {}
        for level in sorted(lines):
            logger.log(level, "%s", "\n".join(lines[level]))


def log_requests() -> Middleware:
    """Logs method, path (without query: it may hold secrets), status, time, user and prompt."""
    log = RequestLog()

    @web.middleware
    async def note(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.perf_counter()
        status = 500
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            level = _level(request.method, status)
            if logger.isEnabledFor(level):
                path = ascii(request.path)[1:-1]
                took_ms = (time.perf_counter() - started) * 1000
                who = f"user={request.get(USER, '-')} from={request.remote}"
                prompt = f"prompt={request.get(PROMPT_ID, '-')}"
                log.note(level, f"{request.method} {path} {status} {took_ms:.1f} ms {who} {prompt}")

    return note
