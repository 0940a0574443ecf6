"""The WebSocket: first frames, flags, who receives what, takeover, resume, slow readers."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType
from aiohttp.test_utils import TestClient
from PIL import Image

from comfy_execution import events
from comfy_server import PromptServer
from comfy_server.frames import text_frame
from comfy_server.outbox import LazyFrame, Outbox, Overflow, TextFrame
from protocol import BinaryEventTypes
from tests.comfy_server.conftest import PROMPT, Start
from tests.support.waiting import PATIENCE_S

Client = TestClient[Any, Any]
Socket = ClientWebSocketResponse

FLAGS = json.dumps({"type": "feature_flags", "data": {"supports_preview_metadata": True}})


async def receive(socket: Socket) -> Any:
    """The next frame: an object for text, bytes for binary."""
    message = await asyncio.wait_for(socket.receive(), PATIENCE_S)
    assert message.type in (WSMsgType.TEXT, WSMsgType.BINARY), message
    return json.loads(message.data) if message.type is WSMsgType.TEXT else message.data


async def connect(client: Client, sid: str | None = None, query: str = "") -> Socket:
    """A socket that has received its first frame."""
    socket = await client.ws_connect("/ws" + (f"?clientId={sid}{query}" if sid else ""))
    first = await receive(socket)
    assert first["type"] == "status"
    return socket


async def silent(socket: Socket) -> bool:
    """Whether nothing waits: what the server has sent so far has been read."""
    PromptServer.instance.send_sync("marker", {}, None)
    frame = await receive(socket)
    return bool(frame["type"] == "marker")


def publish(*published: events.Event) -> None:
    for event in published:
        PromptServer.instance.publish(event)


async def test_the_first_frame_carries_the_id(client: Client) -> None:
    async with client.ws_connect("/ws?clientId=me") as socket:
        assert await receive(socket) == {
            "type": "status",
            "data": {"status": {"exec_info": {"queue_remaining": 0}}, "sid": "me"},
        }
    async with client.ws_connect("/api/ws") as socket:
        sid = (await receive(socket))["data"]["sid"]
        assert len(sid) == 32
        assert int(sid, 16) >= 0


async def test_only_the_first_parsed_frame_may_carry_flags(client: Client) -> None:
    socket = await connect(client, "me")
    await socket.send_str("no json")
    await socket.send_str(FLAGS)
    assert (await receive(socket))["type"] == "feature_flags"
    flags = PromptServer.instance.sockets_metadata["me"]["feature_flags"]
    assert flags == {"supports_preview_metadata": True}
    await socket.send_str(json.dumps({"type": "feature_flags", "data": {"late": 1}}))
    assert await silent(socket)
    assert "late" not in flags

    other = await connect(client, "other")
    await other.send_str("[1]")
    await other.send_str(FLAGS)
    assert await silent(other)


async def test_the_features_are_the_same_on_the_socket_and_over_http(client: Client) -> None:
    socket = await connect(client)
    await socket.send_str(FLAGS)
    on_socket = (await receive(socket))["data"]
    assert on_socket == await (await client.get("/features")).json()
    assert on_socket["supports_preview_metadata"] is True
    assert on_socket["max_upload_size"] == 100 * 1024 * 1024


async def test_status_goes_to_all_and_events_to_their_owner(client: Client) -> None:
    mine, other = await connect(client, "mine"), await connect(client, "other")
    await client.post("/prompt", json={"prompt": PROMPT, "client_id": "mine"})
    for socket in (mine, other):
        frame = await receive(socket)
        assert frame["data"]["status"]["exec_info"]["queue_remaining"] == 1
    publish(events.ExecutionStart("p", 5, "mine"))
    assert await receive(mine) == {
        "type": "execution_start",
        "data": {"prompt_id": "p", "timestamp": 5},
    }
    assert await silent(other)


async def test_news_of_a_prompt_comes_after_the_reply_that_names_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients begin to listen for a prompt when they know its id."""
    monkeypatch.setattr("comfy_server.outbox.LONGEST_HOLD_S", PATIENCE_S)

    def end_at_once(server: PromptServer) -> None:
        submit = server.submit

        async def submit_and_run(item: Any) -> Any:
            submission = await submit(item)
            publish(
                events.ExecutionStart(item[1], 1, "me"), events.ExecutionSuccess(item[1], 2, "me")
            )
            await asyncio.sleep(0.02)  # as when the disk is slow
            return submission

        server.submit = submit_and_run  # type: ignore[method-assign]

    client = await start(end_at_once)
    socket = await connect(client, "me")
    order: list[str] = []

    async def read() -> None:
        while "execution_success" not in order:
            order.append((await receive(socket))["type"])

    reading = asyncio.create_task(read())
    reply = await client.post("/prompt", json={"prompt": PROMPT, "client_id": "me"})
    order.append(f"reply {reply.status}")
    await reading
    assert order == ["reply 200", "status", "execution_start", "execution_success"]


async def test_frames_are_not_held_back_for_ever_by_one_who_never_ceases_to_post() -> None:
    outbox = Outbox()
    outbox.hold()
    outbox.put(TextFrame("news"))
    assert outbox.take_ready() == []
    outbox._held_since -= 1  # a second later
    outbox.hold()
    (frame,) = await asyncio.wait_for(outbox.take(), PATIENCE_S)
    assert isinstance(frame, TextFrame)
    assert frame.text == "news"


async def test_the_start_of_a_held_prompt_passes_but_not_its_result() -> None:
    outbox = Outbox()
    outbox.hold()
    for kind in ("status", "execution_start", "execution_success"):
        outbox.put(TextFrame(text_frame(kind, {})))
    outbox.let_start_pass()
    early = await asyncio.wait_for(outbox.take(), PATIENCE_S)
    assert [json.loads(frame.text)["type"] for frame in early if isinstance(frame, TextFrame)] == [
        "status",
        "execution_start",
    ]
    outbox.release()
    assert len(await asyncio.wait_for(outbox.take(), PATIENCE_S)) == 1


async def test_progress_of_an_ownerless_prompt_goes_to_all_but_its_start_to_nobody(
    client: Client,
) -> None:
    first, second = await connect(client, "a"), await connect(client, "b")
    publish(events.ExecutionStart("p", 5), events.Progress(1, 2, "p", "3"))
    for socket in (first, second):
        assert (await receive(socket))["type"] == "progress"


async def test_a_returning_owner_is_told_which_node_runs(client: Client) -> None:
    publish(events.ExecutionStart("p", 1, "me"), events.Executing("3.0.1", "p", "3", "me"))
    assert PromptServer.instance.last_node_id == "3"
    socket = await connect(client, "me")
    assert await receive(socket) == {"type": "executing", "data": {"node": "3"}}
    publish(events.Executing(None, "p", None, "me"))
    assert (await receive(socket))["data"] == {"node": None, "prompt_id": "p"}
    again = await connect(client, "me")
    assert await silent(again)


async def test_of_several_running_prompts_an_owner_is_told_of_their_own(client: Client) -> None:
    for owner, node in (("me", "3"), ("you", "4")):
        publish(events.ExecutionStart(f"of {owner}", 1, owner))
        publish(events.Executing(node, f"of {owner}", node, owner))
    for owner, node in (("me", "3"), ("you", "4")):
        socket = await connect(client, owner)
        assert await receive(socket) == {"type": "executing", "data": {"node": node}}


async def test_a_newer_socket_takes_over_and_survives_the_older(client: Client) -> None:
    older = await connect(client, "me")
    newer = await connect(client, "me")
    publish(events.Progress(1, 2, "p", "3", "me"))
    assert (await receive(newer))["type"] == "progress"
    await older.close()
    await asyncio.sleep(0)
    publish(events.Progress(2, 2, "p", "3", "me"))
    assert (await receive(newer))["data"]["value"] == 2
    assert PromptServer.instance.sockets["me"] is not None
    await newer.close()
    while "me" in PromptServer.instance.sockets:
        await asyncio.sleep(0.01)


def picture(width: int = 32, height: int = 16) -> Image.Image:
    return Image.new("RGB", (width, height), (200, 10, 10))


METADATA = {
    "node_id": "3",
    "prompt_id": "p",
    "display_node_id": "3",
    "parent_node_id": None,
    "real_node_id": "3",
}


async def test_previews_take_the_form_each_client_negotiated(client: Client) -> None:
    modern, legacy = await connect(client, "modern"), await connect(client, "legacy")
    await modern.send_str(FLAGS)
    await receive(modern)
    for owner in ("modern", "legacy"):
        publish(
            events.Preview("JPEG", picture(), 64, METADATA, owner),
            events.Progress(1, 2, "p", "3", owner),
            events.Preview("JPEG", picture(), 64, None, owner),
        )
    frame = await receive(modern)
    event, length = struct.unpack_from(">II", frame)
    assert event == BinaryEventTypes.PREVIEW_IMAGE_WITH_METADATA
    assert json.loads(frame[8 : 8 + length]) == {**METADATA, "image_type": "image/jpeg"}
    assert frame[8 + length :].startswith(b"\xff\xd8\xff")
    assert (await receive(modern))["type"] == "progress"
    assert await silent(modern)

    assert (await receive(legacy))["type"] == "progress"
    frame = await receive(legacy)
    assert struct.unpack_from(">II", frame) == (BinaryEventTypes.PREVIEW_IMAGE, 1)
    assert frame[8:].startswith(b"\xff\xd8\xff")


async def test_previews_are_fitted_and_pngs_are_pngs(client: Client) -> None:
    import io

    socket = await connect(client, "me")
    publish(events.Preview("JPEG", picture(32, 16), 64, None, "me"))
    with Image.open(io.BytesIO((await receive(socket))[8:])) as shown:
        assert shown.size == (64, 32)
    publish(events.Preview("PNG", picture(600, 600), None, None, "me"))
    frame = await receive(socket)
    assert struct.unpack_from(">II", frame) == (BinaryEventTypes.PREVIEW_IMAGE, 2)
    with Image.open(io.BytesIO(frame[8:])) as shown:
        assert (shown.format, shown.size) == ("PNG", (600, 600))


async def test_an_image_that_cannot_be_encoded_does_not_silence_the_socket(
    client: Client,
) -> None:
    socket = await connect(client, "me")
    publish(events.Preview("JPEG", object(), 64, None, "me"))
    publish(events.Progress(1, 2, "p", "3", "me"))
    assert (await receive(socket))["type"] == "progress"


async def test_progress_text_and_frames_of_packs(client: Client) -> None:
    socket = await connect(client, "me")
    publish(events.ProgressText("größer", "7", "p", "me"))
    assert await receive(socket) == struct.pack(">II", 3, 1) + b"7" + "größer".encode()
    server = PromptServer.instance
    server.send_sync("img-send", {"value": float("nan"), "odd": {1, 2}}, "me")
    frame = await receive(socket)
    assert frame["type"] == "img-send"
    assert frame["data"]["value"] is None
    server.send_sync(BinaryEventTypes.PREVIEW_IMAGE, b"\0\0\0\1jpeg", "me")
    assert await receive(socket) == struct.pack(">II", 1, 1) + b"jpeg"
    server.send_sync(BinaryEventTypes.UNENCODED_PREVIEW_IMAGE, ("PNG", picture(), None), "me")
    assert struct.unpack_from(">II", await receive(socket)) == (1, 2)
    await server.send("async-message", {"a": 1})
    assert (await receive(socket))["data"] == {"a": 1}


async def test_a_failing_event_does_not_raise_into_the_worker(client: Client) -> None:
    class Broken:
        name, client_id, broadcast = "broken", None, True

        def payload(self) -> dict[str, Any]:
            raise ValueError("no")

    socket = await connect(client, "a")
    publish(Broken(), events.Progress(1, 2, "p", "3"))
    assert (await receive(socket))["type"] == "progress"


async def test_previews_are_not_sent_more_often_than_the_interval(start: Start) -> None:
    client = await start(preview_interval_s=3600.0)
    socket = await connect(client, "me")
    for _ in range(5):
        publish(events.Preview("JPEG", picture(), 64, None, "me"))
    publish(events.Preview("PNG", picture(), None, None, "me"))  # a result: never dropped
    assert isinstance(await receive(socket), bytes)
    frame = await receive(socket)
    assert struct.unpack_from(">II", frame) == (1, 2)
    assert await silent(socket)


async def test_a_waiting_preview_is_replaced_by_a_newer_one_in_place() -> None:
    outbox = Outbox()
    one, two = TextFrame("one"), TextFrame("two")
    newest = LazyFrame(lambda: b"new", key="node")
    result = LazyFrame(lambda: b"result")
    for frame in (one, LazyFrame(lambda: b"old", key="node"), two, newest, result):
        outbox.put(frame)
    assert await outbox.take() == [one, two, newest]
    assert await outbox.take() == [result]
    assert outbox.dropped == 1


async def test_waiting_text_that_tells_a_whole_state_is_replaced_too() -> None:
    outbox = Outbox(max_bytes=12)
    event, newest = TextFrame("event"), TextFrame("state 2", key="prompt")
    for frame in (TextFrame("state 1", key="prompt"), event, newest):
        outbox.put(frame)
    assert await outbox.take() == [event, newest]
    later = TextFrame("state 3", key="prompt")
    outbox.put(later)
    assert await outbox.take() == [later]
    assert outbox.dropped == 1


async def test_an_outbox_is_bounded_in_frames_and_bytes() -> None:
    outbox = Outbox(max_frames=2, max_bytes=10)
    outbox.put(b"12345")
    outbox.put(b"12345")
    with pytest.raises(Overflow):
        outbox.put(b"1")
    outbox = Outbox(max_frames=9, max_bytes=10)
    outbox.put(TextFrame("12345"))
    with pytest.raises(Overflow):
        outbox.put(b"123456")


async def test_a_numbered_stream_resumes_where_it_broke(client: Client) -> None:
    socket = await client.ws_connect("/ws?clientId=me&resume=new")
    first = (await receive(socket))["data"]
    stream = first["stream"]
    publish(events.Progress(1, 9, "p", "3", "me"))
    seen = await receive(socket)
    assert (seen["seq"], seen["type"]) == (1, "progress")
    await socket.close()
    for value in (2, 3):
        publish(events.Progress(value, 9, "p", "3", "me"))
    back = await client.ws_connect(f"/ws?clientId=me&resume={stream}:1")
    assert (await receive(back))["type"] == "status"
    missed = [await receive(back), await receive(back)]
    assert [frame["seq"] for frame in missed] == [2, 3]
    assert [frame["data"]["value"] for frame in missed] == [2, 3]
    publish(events.Progress(4, 9, "p", "3", "me"))
    assert (await receive(back))["seq"] == 4


@pytest.mark.parametrize("resume", ["other:1", "nonsense", "STREAM:99"])
async def test_a_gap_that_cannot_be_filled_is_said(client: Client, resume: str) -> None:
    socket = await client.ws_connect("/ws?clientId=me&resume=new")
    stream = (await receive(socket))["data"]["stream"]
    await socket.close()
    query = resume.replace("STREAM", stream)
    back = await client.ws_connect(f"/ws?clientId=me&resume={query}")
    await receive(back)
    assert (await receive(back))["type"] == "resume_gap"


async def test_plain_clients_see_a_plain_stream(client: Client) -> None:
    socket = await connect(client, "me")
    publish(events.Progress(1, 9, "p", "3", "me"))
    assert set(await receive(socket)) == {"type", "data"}


async def test_log_lines_reach_subscribers_only(client: Client) -> None:
    watching, other = await connect(client, "watching"), await connect(client, "other")
    body = {"clientId": "watching", "enabled": True}
    assert (await client.patch("/internal/logs/subscribe", json=body)).status == 200
    logs = PromptServer.instance.logs
    logs.write("hello\n")
    logs.flush()
    frame = await receive(watching)
    assert frame["type"] == "logs"
    assert [entry["m"] for entry in frame["data"]["entries"]] == ["hello\n"]
    assert await silent(other)
    await client.patch("/internal/logs/subscribe", json={**body, "enabled": False})
    logs.write("more\n")
    logs.flush()
    assert await silent(watching)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, 300_000])
async def test_frames_of_every_size_arrive_whole(client: Client, size: int) -> None:
    socket = await connect(client, "me")
    PromptServer.instance.send_sync("sized", "ü" * size, "me")
    assert (await receive(socket))["data"] == "ü" * size
    PromptServer.instance.send_sync(BinaryEventTypes.TEXT, b"x" * size, "me")
    assert await receive(socket) == struct.pack(">I", 3) + b"x" * size


async def test_a_reader_who_does_not_read_is_cut_off_and_delays_nobody(client: Client) -> None:
    import socket as plain_socket

    port = client.server.port
    stuck = plain_socket.create_connection(("127.0.0.1", port))
    stuck.setsockopt(plain_socket.SOL_SOCKET, plain_socket.SO_RCVBUF, 4096)
    stuck.sendall(
        f"GET /ws?clientId=stuck HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
    )
    quick = await connect(client, "quick")
    hub = PromptServer.instance.hub
    while "stuck" not in hub.clients:
        await asyncio.sleep(0.005)
    for number in range(60):
        PromptServer.instance.send_sync("large", "x" * 1_000_000)
        frame = await receive(quick)
        assert frame["type"] == "large", number
    assert "stuck" not in hub.clients
    stuck.close()


async def test_compressed_sockets_speak_the_same(start: Start) -> None:
    client = await start(compress=True)
    socket = await connect(client, "me")
    PromptServer.instance.hub.clients["me"].transport = None  # as for one who asked for it
    publish(events.Progress(1, 2, "p", "3", "me"), events.ProgressText("t", "1", "p", "me"))
    publish(events.Preview("JPEG", picture(), 64, None, "me"))
    assert (await receive(socket))["type"] == "progress"
    assert await receive(socket) == struct.pack(">II", 3, 1) + b"1t"
    assert struct.unpack_from(">II", await receive(socket)) == (1, 1)
