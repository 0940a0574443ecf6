"""What is sent in a worker process reaches the sockets of the server, byte for byte as without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from PIL import Image

from comfy_execution import events
from comfy_execution.queue import PromptQueue
from comfy_execution.workers.messages import Message, dump, event_from, load, unpack_bytes
from comfy_server import LogCapture, PromptServer, ServerOptions, Services
from comfy_server.relay import PICTURES, RelayServer
from protocol import BinaryEventTypes
from tests.comfy_server.conftest import Start
from tests.support.waiting import PATIENCE_S

PICTURE = Image.radial_gradient("L").resize((40, 20)).convert("RGB")
RECORD = {"node_id": "3", "prompt_id": "p"}


def deliver(server: PromptServer, message: Message) -> None:
    """What a place does with news, over the wire's form."""
    came = load(dump(message))
    if came["say"] == "event":
        server.publish(event_from(came, PICTURES))
    else:
        data = unpack_bytes(came["base64"]) if "base64" in came else came["data"]
        server.send_sync(came["event"], data, came["sid"])


SENDINGS: dict[str, Callable[[PromptServer], object]] = {
    "text": lambda s: s.send_sync("mine", {"a": [1, float("nan")]}, "me"),
    "text to all": lambda s: s.send_sync("mine", {"a": "ü"}),
    "bytes": lambda s: s.send_sync(7, b"\x00\xff", "me"),
    "picture": lambda s: s.send_sync(
        BinaryEventTypes.UNENCODED_PREVIEW_IMAGE, ("PNG", PICTURE, 32), "me"
    ),
    "picture with a record": lambda s: s.send_sync(
        BinaryEventTypes.PREVIEW_IMAGE_WITH_METADATA, (("JPEG", PICTURE, None), RECORD), "me"
    ),
    "line of text": lambda s: s.send_progress_text("half", "3", "me"),
    "preview": lambda s: s.publish(events.Preview("JPEG", PICTURE, 64, None, "me")),
    "preview of a larger picture": lambda s: s.publish(
        events.Preview("JPEG", PICTURE, 27, None, "me")
    ),
    "preview of transparency": lambda s: s.publish(
        events.Preview("PNG", PICTURE.convert("RGBA"), 19, None, "me")
    ),
    "preview of colours in print": lambda s: s.publish(
        events.Preview("JPEG", PICTURE.convert("CMYK"), 64, None, "me")
    ),
    "progress": lambda s: s.publish(events.Progress(1, 2, "p", "3", "me")),
}


@pytest.mark.parametrize("name", SENDINGS)
async def test_what_a_worker_sends_arrives_as_what_the_server_sends(
    start: Start, options: ServerOptions, name: str
) -> None:
    client = await start()
    server = PromptServer.instance
    socket = await client.ws_connect("/ws?clientId=me")
    await socket.receive()
    SENDINGS[name](server)
    direct = await asyncio.wait_for(socket.receive(), PATIENCE_S)
    said: list[Message] = []
    services = Services(PromptQueue())
    relay = RelayServer(server.loop, options, services, LogCapture(), said.append)
    try:
        SENDINGS[name](relay)
    finally:
        PromptServer.instance = server
    for message in said:
        deliver(server, message)
    relayed = await asyncio.wait_for(socket.receive(), PATIENCE_S)
    assert relayed.type == direct.type
    assert relayed.data == direct.data


async def test_a_worker_knows_whose_prompt_it_runs_and_keeps_its_queue_to_itself(
    start: Start, options: ServerOptions
) -> None:
    await start()
    server, said = PromptServer.instance, list[Message]()
    relay = RelayServer(server.loop, options, Services(PromptQueue()), LogCapture(), said.append)
    PromptServer.instance = server
    relay.prompt_queue.submit((0, "p", {}, {}, []))
    assert said == []
    relay.publish(events.ExecutionStart("p", 1, "me"))
    relay.publish(events.Executing("5:2", "p", "5", "me"))
    assert (relay.client_id, relay.last_prompt_id, relay.last_node_id) == ("me", "p", "5")
    assert [message["kind"] for message in said] == ["ExecutionStart", "Executing"]


async def test_of_a_large_picture_only_what_is_shown_leaves_the_worker(
    start: Start, options: ServerOptions
) -> None:
    await start()
    server, said = PromptServer.instance, list[Message]()
    relay = RelayServer(server.loop, options, Services(PromptQueue()), LogCapture(), said.append)
    PromptServer.instance = server
    for max_size in (32, 512, None):
        relay.publish(events.Preview("JPEG", PICTURE, max_size, None, "me"))
    pictures = [PICTURES.unpack(unpack_bytes(message["fields"]["image"])) for message in said]
    assert [picture.size for picture in pictures] == [(32, 16), PICTURE.size, PICTURE.size]
