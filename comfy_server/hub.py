"""All open sockets: who they are, what reaches them, and what a returning client has missed.

The hub lives on the event loop. Other threads hand over through `post`, which wakes the loop once
however many frames they hand over meanwhile. Each socket has an outbox and a writer task, so one
slow or dead reader delays nobody.

A client may ask for numbered frames: `/ws?clientId=<id>&resume=new` at first, afterwards
`resume=<stream>:<last number>`. Its text frames then carry `seq`, the first frame names the
`stream`, and after a reconnect it is sent what it missed, or told by a `resume_gap` frame that some
is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSCloseCode, web

from comfy_server.frames import text_frame, wire_form
from comfy_server.outbox import Frame, LazyFrame, Outbox, Overflow, TextFrame
from comfy_server.streams import Stream, Streams

logger = logging.getLogger(__name__)

MOST_CLAIMS = 100_000
UNREAD_BYTES = 256 * 1024
UNREAD_CHECK_S = 0.01


@dataclass(eq=False)
class Client:
    """One open socket."""

    sid: str
    socket: web.WebSocketResponse
    user: str = "default"
    transport: asyncio.Transport | None = None  # None: the connection is compressed
    stream: Stream | None = None
    outbox: Outbox = field(default_factory=Outbox)
    flags: dict[str, Any] = field(default_factory=dict)
    wants_logs: bool = False
    last_preview: dict[object, float] = field(default_factory=dict)
    writer: asyncio.Task[None] | None = None


class Hub:
    """Open sockets by client id; every method but `post` belongs to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, preview_interval_s: float = 0.1) -> None:
        self.clients: dict[str, Client] = {}
        self.sockets: dict[str, web.WebSocketResponse] = {}  # the view of it that packs read
        self.metadata: dict[str, dict[str, Any]] = {}
        self._streams = Streams()
        self._owners: OrderedDict[str, str] = OrderedDict()  # client id -> user, with accounts
        self._loop = loop
        self._preview_interval_s = preview_interval_s
        self._encoder: ThreadPoolExecutor | None = None
        self._posted: deque[Callable[[], None]] = deque()
        self._wake_pending = False
        self._is_collecting = False  # frames of many events leave in one write
        self._with_new_frames: dict[Client, None] = {}

    # -- from any thread -----------------------------------------------------------------------

    def post(self, action: Callable[[], None], is_last: bool = True) -> None:
        """Runs `action` on the event loop, in order; returns at once.

        Waking the loop costs the calling thread its turn of the interpreter. `is_last` False says
        that another call follows at once: that one wakes it.
        """
        self._posted.append(action)
        if is_last and not self._wake_pending:
            self._wake_pending = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(self._run_posted)

    def _run_posted(self) -> None:
        self._wake_pending = False
        self._is_collecting = True
        while self._posted:
            try:
                self._posted.popleft()()
            except Exception:  # one bad frame must not stop those that follow
                logger.exception("a frame could not be delivered")
        self._is_collecting = False
        receivers, self._with_new_frames = self._with_new_frames, {}
        for client in receivers:
            self._hand_over(client)

    def _hand_over(self, client: Client) -> None:
        """Writes what can be written at once; the rest is the writer task's."""
        transport = client.transport
        if (
            transport is not None
            and not client.socket.closed
            and not transport.is_closing()
            and transport.get_write_buffer_size() <= UNREAD_BYTES
        ):
            ready = client.outbox.take_ready()
            if ready:
                transport.write(b"".join(map(_wire, ready)))
                return
        client.outbox.wake()

    # -- sockets -------------------------------------------------------------------------------

    def attach(self, client: Client, resume: str | None) -> None:
        """Registers a socket; a newer one takes over the id of an older."""
        sid = client.sid
        if resume is not None:
            client.stream = self._streams.open(sid)
        self.clients[sid] = client
        self.sockets[sid] = client.socket
        self.metadata[sid] = {"feature_flags": client.flags}
        client.writer = self._loop.create_task(self._write(client))

    def claim(self, sid: str, user: str) -> bool:
        """Binds a client id to the first user who uses it; False if it is another's.

        Of very many ids the oldest are free again, but never that of an open socket.
        """
        owner = self._owners.setdefault(sid, user)
        self._owners.move_to_end(sid)
        if len(self._owners) > MOST_CLAIMS:
            old = next((name for name in self._owners if name not in self.clients), sid)
            del self._owners[old]
        return owner == user

    def detach(self, client: Client) -> None:
        """Forgets a socket, and its id unless a newer socket holds it."""
        if client.writer is not None:
            client.writer.cancel()
        if self.clients.get(client.sid) is client:
            del self.clients[client.sid], self.sockets[client.sid], self.metadata[client.sid]
            if client.stream is not None:
                self._streams.close(client.stream)

    def greet(self, client: Client, status: dict[str, Any], resume: str | None) -> None:
        """Sends the first frame, and before any other what a returning client has missed."""
        first: dict[str, Any] = {"status": status["status"], "sid": client.sid}
        if client.stream is None:
            self._put(client, TextFrame(text_frame("status", first)))
            return
        first["stream"] = client.stream.token
        token, _, last = (resume or "").partition(":")
        missed: list[TextFrame] | None = []
        if resume != "new":
            known = token == client.stream.token and last.isdecimal()
            missed = client.stream.missed_since(int(last)) if known else None
        first["seq"] = client.stream.sequence
        self._put(client, TextFrame(text_frame("status", first)))
        if missed is None:
            self._put(client, TextFrame(text_frame("resume_gap", {"sid": client.sid})))
        for frame in missed or ():
            self._put(client, frame)

    # -- frames --------------------------------------------------------------------------------

    def send_text(self, kind: str, data: Any, sid: str | None = None) -> None:
        """Sends a text frame to one client, or to all when `sid` is None."""
        self.send_frame(text_frame(kind, data), sid)

    def send_frame(
        self,
        frame: str,
        sid: str | None,
        user: str | None = None,
        key: object | None = None,
    ) -> None:
        """Sends encoded text to one client, or to all sockets (of one user).

        A client that asked for numbered frames gets its numbers even while it is away.

        Args:
            key: Frames with the same key replace each other while they wait, numbered ones
                excepted.
        """
        if sid is None:
            shared = TextFrame(frame, key)
            for client in self._receivers(None, user):
                self._put_text(client, shared)
            return
        found, stream = self.clients.get(sid), self._streams.get(sid)
        if found is not None:
            self._put_text(found, TextFrame(frame, key))
        elif stream is not None:
            stream.number(frame)

    def send_binary(
        self, frame: bytes | LazyFrame, sid: str | None, user: str | None = None
    ) -> None:
        """Sends a binary frame to one client, or to all sockets (of one user)."""
        for client in self._receivers(sid, user):
            self._put(client, frame)

    def send_preview(
        self,
        frame: LazyFrame,
        sid: str | None,
        wanted: Callable[[Client], bool],
        user: str | None = None,
    ) -> None:
        """Sends a preview to those who want its kind, not more often than the interval allows."""
        now = time.monotonic()
        for client in self._receivers(sid, user):
            if not wanted(client):
                continue
            if frame.key is not None:
                if now - client.last_preview.get(frame.key, -math.inf) < self._preview_interval_s:
                    client.outbox.dropped += 1
                    continue
                client.last_preview = {frame.key: now}
            self._put(client, frame)

    def send_logs(self, entries: list[dict[str, str]], size: dict[str, int] | None) -> None:
        """Sends new log entries to the sockets that subscribed to them."""
        watching = [client for client in self.clients.values() if client.wants_logs]
        if watching:
            frame = TextFrame(text_frame("logs", {"entries": entries, "size": size}))
            for client in watching:
                self._put(client, frame)

    @property
    def is_watched(self) -> bool:
        """Whether anybody follows the log; may be asked from any thread."""
        return any(client.wants_logs for client in list(self.clients.values()))

    def is_heard(self, sid: str | None) -> bool:
        """Whether a frame to this client (None: to all) reaches, or is kept for, anybody.

        May be asked from any thread: frames of long prompts are dear to make for nobody.
        """
        return bool(self.clients) if sid is None else sid in self.clients or sid in self._streams

    def _receivers(self, sid: str | None, user: str | None) -> list[Client]:
        if sid is None:
            clients = list(self.clients.values())
            return [client for client in clients if user in (None, client.user)]
        return [self.clients[sid]] if sid in self.clients else []

    def _put_text(self, client: Client, frame: TextFrame) -> None:
        self._put(client, frame if client.stream is None else client.stream.number(frame.text))

    def _put(self, client: Client, frame: Frame) -> None:
        try:
            client.outbox.put(frame)
            if self._is_collecting:
                self._with_new_frames[client] = None
            else:
                client.outbox.wake()
        except Overflow:
            logger.warning("socket %s does not read; closing it", client.sid)
            self.detach(client)
            self._abort(client)

    def _abort(self, client: Client) -> None:
        """Cuts the connection: a closing handshake would wait for one who does not read."""
        if client.transport is not None:
            client.transport.abort()
        else:
            self._loop.create_task(client.socket.close(code=WSCloseCode.TRY_AGAIN_LATER))

    async def _write(self, client: Client) -> None:
        if self._encoder is None:
            self._encoder = ThreadPoolExecutor(1, thread_name_prefix="preview-encoder")
        while True:
            try:
                await self._send(client, await client.outbox.take(), self._encoder)
            except (ConnectionError, RuntimeError):
                return  # the socket is closing; its reader detaches it
            except Exception:  # an image that cannot be encoded must not silence the socket
                logger.exception("a preview for socket %s could not be encoded", client.sid)

    async def _send(self, client: Client, frames: list[Frame], encoder: Executor) -> None:
        """Sends frames in order; only the last may be one that has yet to be encoded."""
        if client.transport is None:
            await self._send_compressed(client, frames, encoder)
            return
        ready = [_wire(frame) for frame in frames if not isinstance(frame, LazyFrame)]
        if ready:
            await self._write_wire(client, client.transport, b"".join(ready))
        if isinstance(frames[-1], LazyFrame):
            data = await frames[-1].data(encoder)
            await self._write_wire(client, client.transport, wire_form(data, is_text=False))

    @staticmethod
    async def _write_wire(client: Client, transport: asyncio.Transport, data: bytes) -> None:
        """Writes whole frames, and waits while the reader is behind."""
        if client.socket.closed or transport.is_closing():
            raise ConnectionResetError
        transport.write(data)
        while transport.get_write_buffer_size() > UNREAD_BYTES and not transport.is_closing():
            await asyncio.sleep(UNREAD_CHECK_S)

    @staticmethod
    async def _send_compressed(client: Client, frames: list[Frame], encoder: Executor) -> None:
        for frame in frames:
            if isinstance(frame, TextFrame):
                await client.socket.send_str(frame.text)
            else:
                data = frame if isinstance(frame, bytes) else await frame.data(encoder)
                await client.socket.send_bytes(data)

    async def close(self) -> None:
        """Closes every socket, as the server goes down."""
        clients = list(self.clients.values())
        for client in clients:
            self.detach(client)
        closings = [client.socket.close(code=WSCloseCode.GOING_AWAY) for client in clients]
        await asyncio.gather(*closings, return_exceptions=True)
        if self._encoder is not None:
            self._encoder.shutdown(wait=False, cancel_futures=True)


def _wire(frame: Frame) -> bytes:
    """The bytes of a frame that is encoded, on an uncompressed connection."""
    if isinstance(frame, LazyFrame):
        raise TypeError("a preview must be encoded before it is sent")
    return frame.wire if isinstance(frame, TextFrame) else wire_form(frame, is_text=False)
