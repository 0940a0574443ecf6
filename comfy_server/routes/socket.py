"""The WebSocket: `/ws`."""

from __future__ import annotations

import json
import logging
import uuid
from typing import TYPE_CHECKING, Any

from aiohttp import WSMsgType, web

from comfy_server.auth import owner_of
from comfy_server.describe import EMPTY, TEXT, describe, ref
from comfy_server.frames import text_frame
from comfy_server.gate import is_loopback
from comfy_server.hub import Client
from comfy_server.outbox import TextFrame
from comfy_server.services import OPTIONS, SERVER
from comfy_server.strict_json import error_response
from comfy_server.users import DEFAULT_USER

if TYPE_CHECKING:
    from comfy_server.prompt_server import PromptServer

logger = logging.getLogger(__name__)

routes = web.RouteTableDef()

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
MAX_CLIENT_ID = 256
MAX_FLAGS_CHARACTERS = 64 * 1024


@routes.get("/ws")
@describe(EMPTY, status=101, query={"clientId": TEXT, "resume": TEXT}, answers={400: ref("Error")})
async def connect(request: web.Request) -> web.StreamResponse:
    """Opens the event socket of a client."""
    server = request.app[SERVER]
    sid = request.query.get("clientId") or uuid.uuid4().hex
    if len(sid) > MAX_CLIENT_ID or not sid.isprintable():
        return error_response(
            400, f"clientId must be printable text of at most {MAX_CLIENT_ID} characters"
        )
    owner = owner_of(request)  # a browser's socket cannot name a user any other way
    if owner is not None and not server.hub.claim(sid, owner):
        return error_response(403, "this clientId belongs to another user; use one of your own")
    resume = request.query.get("resume")
    # on this machine compressing costs more than it saves
    compress = request.app[OPTIONS].compress and not is_loopback(request.remote or "")
    socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES, compress=compress)
    await socket.prepare(request)
    transport = None if socket.compress else request.transport
    client = Client(sid, socket, owner or DEFAULT_USER, transport)
    server.hub.attach(client, resume)
    server.hub.greet(client, {"status": server.get_queue_info()}, resume)
    node = server.running_node(sid)
    if node is not None:
        server.hub.send_text("executing", {"node": node}, sid)
    try:
        await _listen(server, client)
    finally:
        server.hub.detach(client)
    return socket


async def _listen(server: PromptServer, client: Client) -> None:
    """Reads until the socket closes; only feature flags in the first frame have an effect."""
    is_first = True
    async for message in client.socket:
        if message.type is WSMsgType.ERROR:
            logger.warning("socket %s broke: %s", client.sid, client.socket.exception())
        if message.type is not WSMsgType.TEXT or not is_first:
            continue
        parsed = _parse(message.data)
        if parsed is None:
            continue
        is_first = False
        if parsed.get("type") == "feature_flags":
            flags = parsed.get("data")
            client.flags.update(flags if isinstance(flags, dict) else {})
            features = server.get_feature_flags()
            client.outbox.put(TextFrame(text_frame("feature_flags", features)))
            client.outbox.wake()


def _parse(text: str) -> dict[str, Any] | None:
    """The frame as an object; an empty one for other JSON; None for what is not JSON."""
    if len(text) > MAX_FLAGS_CHARACTERS:
        return {}  # no client has that many flags, and taking it apart would hold up the others
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else {}
