"""Numbered frames of clients that asked for numbers, kept for their return."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable

from comfy_server.frames import with_sequence
from comfy_server.outbox import TextFrame

KEPT_BYTES = 4 * 1024 * 1024
KEPT_STREAMS = 500
KEPT_AFTER_CLOSE_S = 300.0
KEPT_BYTES_OF_CLOSED = 256 * 1024 * 1024


class Stream:
    """The latest text frames of one client id, bounded in bytes."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.token = uuid.uuid4().hex
        self.sequence = 0
        self.closed_at: float | None = None
        self._kept_bytes = kept_bytes
        self._frames: deque[TextFrame] = deque()  # the last one has the number `sequence`
        self._bytes = 0

    @property
    def size_bytes(self) -> int:
        """What the kept frames take."""
        return self._bytes

    def number(self, frame: str) -> TextFrame:
        """Gives the frame the next number and keeps it."""
        self.sequence += 1
        numbered = TextFrame(with_sequence(frame, self.sequence))
        self._frames.append(numbered)
        self._bytes += len(numbered)
        while self._bytes > self._kept_bytes:
            self._bytes -= len(self._frames.popleft())
        return numbered

    def missed_since(self, last: int) -> list[TextFrame] | None:
        """Frames after number `last`; None when some of them are no longer kept."""
        missed = self.sequence - last
        if missed < 0 or missed > len(self._frames):
            return None
        return list(self._frames)[len(self._frames) - missed :]


class Streams:
    """The streams by client id; those of clients long gone are forgotten, the oldest first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._streams: OrderedDict[str, Stream] = OrderedDict()
        self._clock = clock

    def __contains__(self, sid: object) -> bool:
        return sid in self._streams

    def get(self, sid: str) -> Stream | None:
        """The stream of a client, if it has one."""
        return self._streams.get(sid)

    def open(self, sid: str) -> Stream:
        """The stream of a client that is here."""
        stream = self._streams.setdefault(sid, Stream())
        self._streams.move_to_end(sid)
        stream.closed_at = None
        self._forget()
        return stream

    def close(self, stream: Stream) -> None:
        """Marks that its client has gone."""
        stream.closed_at = self._clock()

    def _forget(self) -> None:
        horizon = self._clock() - KEPT_AFTER_CLOSE_S
        closed = [
            (s, stream) for s, stream in self._streams.items() if stream.closed_at is not None
        ]
        surplus = len(self._streams) - KEPT_STREAMS
        surplus_bytes = sum(stream.size_bytes for _, stream in closed) - KEPT_BYTES_OF_CLOSED
        for sid, stream in closed:
            is_old = stream.closed_at is not None and stream.closed_at < horizon
            if is_old or surplus > 0 or surplus_bytes > 0:
                del self._streams[sid]
                surplus -= 1
                surplus_bytes -= stream.size_bytes
