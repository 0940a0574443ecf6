"""The way of text frames through a pack's own `send_json`: one after another, in their order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

logger = logging.getLogger(__name__)

Send = Callable[[str, Any, str | None], Awaitable[None]]


class Detour:
    """Calls a coroutine function for each frame; belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Send, str, Any, str | None]] = deque()
        self._walk: asyncio.Task[None] | None = None

    def take(self, send: Send, event: str, data: Any, sid: str | None) -> None:
        """Sends a frame when those before it are sent."""
        self._waiting.append((send, event, data, sid))
        if self._walk is None or self._walk.done():
            self._walk = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._waiting:
            send, event, data, sid = self._waiting.popleft()
            try:
                await send(event, data, sid)
            except Exception:  # a pack's mistake must not silence the frames that follow
                logger.exception("the frame %s could not be sent by %r", event, send)
