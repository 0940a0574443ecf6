"""Connections that only take up room: those that send nothing, or too slowly, or are too many.

A client may open a connection and send its request a byte a minute, or open thousands: each holds a
file descriptor, and without those nobody is served any more. So every few seconds all connections
are looked at, and the ones are cut that have not sent a whole head of a request in time, whose body
trickles, or, when there are too many, that are idle; if these do not suffice, the newest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

logger = logging.getLogger(__name__)

CHECK_S = 5.0
HEAD_S = 30.0
BODY_S = 60.0
TRICKLE_BYTES = 64 * 1024  # a body of which less has come after BODY_S is not a slow upload
SPARE_DESCRIPTORS = 256  # for files, the journal and packs
FEWEST, MOST = 128, 16_384


class Connection(Protocol):
    """What is looked at of a protocol object of aiohttp."""

    @property
    def transport(self) -> asyncio.Transport | None: ...


@dataclass
class _Visit:
    """A connection since it was first seen."""

    since: float
    is_served: bool = False
    request: web.BaseRequest | None = None
    request_since: float = 0.0


def most_connections() -> int:
    """How many connections this process can hold and still open files."""
    try:
        import resource
    except ImportError:  # no such limit on this system
        return MOST
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MOST
    return max(FEWEST, min(MOST, soft - SPARE_DESCRIPTORS))


class Connections:
    """Knows what each connection is at; belongs to the event loop."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._visits: dict[object, _Visit] = {}

    @web.middleware
    async def note(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Notes which connections are at work on a request."""
        now = self._clock()
        visit = self._visits.setdefault(request.transport, _Visit(now))
        visit.is_served, visit.request, visit.request_since = True, request, now
        try:
            return await handler(request)
        finally:
            visit.request = None

    def sweep(self, connections: Iterable[Connection]) -> int:
        """Cuts the connections that only take up room; returns how many."""
        now = self._clock()
        open_now = [c.transport for c in connections if c.transport is not None]
        self._visits = {t: self._visits.get(t) or _Visit(now) for t in open_now}
        cut = [t for t in open_now if self._is_stuck(self._visits[t], now)]
        surplus = len(open_now) - len(cut) - self._most
        if surplus > 0:
            idle = [t for t in open_now if self._visits[t].request is None and t not in cut]
            idle.sort(key=lambda t: self._visits[t].since)
            cut += idle[:surplus]
            busy = sorted(set(open_now) - set(cut), key=lambda t: self._visits[t].since)
            cut += busy[len(busy) - max(0, surplus - len(idle)) :]
        for transport in cut:
            transport.abort()
            self._visits.pop(transport, None)
        if cut:
            logger.warning("cut %d of %d connections that took up room", len(cut), len(open_now))
        return len(cut)

    @staticmethod
    def _is_stuck(visit: _Visit, now: float) -> bool:
        if visit.request is None:
            return not visit.is_served and now - visit.since > HEAD_S
        body = visit.request.content
        trickles = not body.is_eof() and body.total_bytes < TRICKLE_BYTES
        return trickles and now - visit.request_since > BODY_S

    async def watch(self, connections: Callable[[], Iterable[Connection]]) -> None:
        """Sweeps every few seconds, for ever."""
        while True:
            await asyncio.sleep(CHECK_S)
            self.sweep(connections())


CONNECTIONS: web.AppKey[Connections] = web.AppKey("connections", Connections)
