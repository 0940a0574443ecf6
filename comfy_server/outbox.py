"""Frames on their way to one socket: bounded, in order, and without what has been overtaken.

The event loop appends, one writer task takes. A preview is not yet encoded when it is appended; a
newer preview of the same node replaces one that has not been taken, so a slow reader sees fewer
pictures and no old ones. So it is with text that tells a whole state. All other text waits in order
up to a bound; beyond it the reader is given up.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor

from comfy_server.frames import wire_form

MAX_FRAMES = 1 << 17  # a prompt of 10,000 nodes makes 40,000 frames, faster than many clients read
MAX_BYTES = 32 * 1024 * 1024
LONGEST_HOLD_S = 0.25
START = '{"type":"execution_start"'


class LazyFrame:
    """A binary frame that is encoded when first needed, once for all its receivers."""

    __slots__ = ("_encode", "_future", "key")

    def __init__(self, encode: Callable[[], bytes], key: object | None = None) -> None:
        """`key` tells which frames replace each other; None marks a frame that must arrive."""
        self._encode = encode
        self._future: asyncio.Future[bytes] | None = None
        self.key = key

    async def data(self, executor: Executor) -> bytes:
        """The encoded frame; encoding runs outside the event loop."""
        if self._future is None:
            loop = asyncio.get_running_loop()
            self._future = asyncio.ensure_future(loop.run_in_executor(executor, self._encode))
        return await asyncio.shield(self._future)


class TextFrame:
    """A text frame; its wire form is made once for all its receivers."""

    __slots__ = ("_wire", "key", "text")

    def __init__(self, text: str, key: object | None = None) -> None:
        """`key` tells which frames replace each other; None marks a frame that must arrive."""
        self.text = text
        self.key = key
        self._wire: bytes | None = None

    def __len__(self) -> int:
        return len(self.text)

    @property
    def wire(self) -> bytes:
        """The bytes on an uncompressed connection."""
        if self._wire is None:
            self._wire = wire_form(self.text.encode("utf-8"), is_text=True)
        return self._wire


Frame = TextFrame | bytes | LazyFrame


class Overflow(Exception):
    """A reader is so slow that its frames no longer fit."""


class Outbox:
    """Frames waiting for one socket."""

    def __init__(self, max_frames: int = MAX_FRAMES, max_bytes: int = MAX_BYTES) -> None:
        self._frames: deque[Frame | None] = deque()
        self._latest: dict[object, int] = {}  # key -> absolute position of the waiting preview
        self._taken = 0  # absolute position of the first waiting frame
        self._bytes = 0
        self._waiting = asyncio.Event()
        self._is_awaited = False
        self._holds = 0
        self._held_since = 0.0
        self._start_may_pass = False
        self._max_frames, self._max_bytes = max_frames, max_bytes
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: Frame) -> None:
        """Appends a frame; who waits in `take` learns of it by `wake`.

        Raises:
            Overflow: too many frames or bytes are waiting.
        """
        if not isinstance(frame, bytes):
            self._replace_older(frame)
        self._bytes += _size(frame)
        if len(self._frames) >= self._max_frames or self._bytes > self._max_bytes:
            raise Overflow
        self._frames.append(frame)

    def wake(self) -> None:
        """Lets the waiting `take` have what was put."""
        self._waiting.set()

    def hold(self) -> None:
        """Keeps all frames back until `release`, but not for long if holds never cease."""
        if self._holds == 0:
            self._held_since = time.monotonic()
        self._holds += 1
        self._start_may_pass = False

    def let_start_pass(self) -> None:
        """Sends what was held up to the news that a prompt has started; no result is among it."""
        self._start_may_pass = True
        self.wake()

    def release(self) -> None:
        """Ends one `hold`."""
        self._holds -= 1
        self.wake()

    @property
    def _is_held(self) -> bool:
        return self._holds > 0 and time.monotonic() - self._held_since < LONGEST_HOLD_S

    def _replace_older(self, frame: TextFrame | LazyFrame) -> None:
        if frame.key is None:
            return
        position = self._latest.get(frame.key, -1) - self._taken
        if position >= 0:
            older = self._frames[position]
            self._frames[position] = None
            self._bytes -= _size(older)
            self.dropped += 1
        self._latest[frame.key] = self._taken + len(self._frames)

    def take_ready(self) -> list[Frame]:
        """Frames that can be sent as they are, if nobody is at work on earlier ones; removes them.

        It spares the writer task's turn of the event loop, which costs more than the sending.
        """
        if not self._is_awaited or any(isinstance(frame, LazyFrame) for frame in self._frames):
            return []
        return self._take()

    async def take(self) -> list[Frame]:
        """Waits for frames and removes them, up to the first that has yet to be encoded."""
        while True:
            taken = self._take()
            if taken:
                return taken
            self._waiting.clear()
            self._is_awaited = True
            try:
                await self._waiting.wait()
            finally:
                self._is_awaited = False

    def _take(self) -> list[Frame]:
        taken: list[Frame] = []
        while self._frames and (self._start_may_pass or not self._is_held):
            frame = self._frames.popleft()
            self._taken += 1
            if frame is None:
                continue
            if isinstance(frame, TextFrame) and frame.text.startswith(START):
                self._start_may_pass = False
            taken.append(frame)
            self._bytes -= _size(frame)
            if not isinstance(frame, bytes):
                self._latest.pop(frame.key, None)
            if isinstance(frame, LazyFrame):
                break
        return taken


def _size(frame: Frame | None) -> int:
    """Bytes that a waiting frame holds; a preview that is not encoded counts as none."""
    return 0 if frame is None or isinstance(frame, LazyFrame) else len(frame)
