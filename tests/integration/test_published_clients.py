"""What published clients take for granted, one habit each; every one was seen in use.

Python, JavaScript and MCP clients were run against the server; these are the points on which they
would have stood still or failed.
"""

from __future__ import annotations

import asyncio
import io
import json
import urllib.parse
import uuid
from typing import Any

import aiohttp
import pytest
from PIL import Image

from tests.support.prompts import demo_prompt
from tests.support.server_process import ServerProcess

HOURS = 10_000  # steps that nobody waits for
TIMEOUT_S = 60


def flat(colour: int, prefix: str = "client") -> dict[str, Any]:
    """A prompt that takes next to no time."""
    size = {"width": 64, "height": 64, "batch_size": 1, "color": colour}
    saving = {"images": ["1", 0], "filename_prefix": prefix}
    return {
        "1": {"class_type": "EmptyImage", "inputs": size, "_meta": {"title": "Empty"}},
        "2": {"class_type": "SaveImage", "inputs": saving, "_meta": {"title": "Save"}},
    }


async def next_frame(socket: aiohttp.ClientWebSocketResponse) -> Any:
    """The next text frame."""
    while True:
        message = await socket.receive(timeout=TIMEOUT_S)
        if message.type is aiohttp.WSMsgType.TEXT:
            return json.loads(message.data)


async def test_a_result_that_is_known_is_told_like_one_that_ran(server: ServerProcess) -> None:
    """Clients wait for `executed` and for the end, whether anything had to run or not."""
    client_id = uuid.uuid4().hex
    async with (
        aiohttp.ClientSession(server.url) as session,
        session.ws_connect(f"/ws?clientId={client_id}") as socket,
    ):
        await next_frame(socket)
        for _ in range(6):  # from the second on nothing has to run
            body = {"prompt": flat(0x102030), "client_id": client_id}
            async with session.post("/prompt", json=body) as answer:
                prompt_id = (await answer.json())["prompt_id"]
            kinds = [""]
            while kinds[-1] != "executing none":
                frame = await next_frame(socket)
                is_end = frame["type"] == "executing" and frame["data"]["node"] is None
                if is_end:
                    assert frame["data"]["prompt_id"] == prompt_id
                kinds.append("executing none" if is_end else frame["type"])
            assert "execution_success" in kinds
            assert "executed" in kinds  # of a known result, too


async def test_a_client_that_connects_after_posting_learns_that_all_is_done(
    server: ServerProcess,
) -> None:
    """It waits for a status frame that says nothing remains, then reads the history."""
    client_id = uuid.uuid4().hex
    async with aiohttp.ClientSession(server.url) as session:
        body = {"prompt": flat(0x405060), "client_id": client_id}
        async with session.post("/prompt", json=body) as answer:
            prompt_id = (await answer.json())["prompt_id"]
        async with session.ws_connect(f"/ws?clientId={client_id}") as socket:
            remaining = 1
            while remaining:
                frame = await next_frame(socket)
                if frame["type"] == "status":
                    remaining = frame["data"]["status"]["exec_info"]["queue_remaining"]
        assert prompt_id in server.get(f"/history/{prompt_id}")


@pytest.mark.parametrize("root", ["", "/api"])
def test_a_poller_without_a_socket_gets_its_picture_each_time(
    server: ServerProcess, root: str
) -> None:
    """It posts the same graph twice and reads the entry's first picture by all its fields."""
    own_id = str(uuid.uuid4())
    assert server.get(f"{root}/history/{own_id}") == {}
    for wish in ({}, {"prompt_id": own_id}):
        status, answer = server.post(f"{root}/prompt?clientId=x", {"prompt": flat(1), **wish})
        assert status == 200
        prompt_id = answer["prompt_id"]
        assert prompt_id == wish.get("prompt_id", prompt_id)
        entry = server.wait(prompt_id)
        assert entry["status"]["completed"] is True
        query = urllib.parse.urlencode(entry["outputs"]["2"]["images"][0])
        picture = Image.open(io.BytesIO(server.get_bytes(f"{root}/view?{query}")))
        assert picture.size == (64, 64)


async def test_results_can_come_over_the_socket(server: ServerProcess) -> None:
    """Each picture as a PNG behind eight bytes, every time, also when it is known."""
    size = {"width": 96, "height": 64, "batch_size": 3, "color": 0x0A141E}
    prompt = {
        "1": {"class_type": "EmptyImage", "inputs": size},
        "2": {"class_type": "SaveImageWebsocket", "inputs": {"images": ["1", 0]}},
    }
    client_id = uuid.uuid4().hex
    async with (
        aiohttp.ClientSession(server.url) as session,
        session.ws_connect(f"/ws?clientId={client_id}") as socket,
    ):
        for _ in range(2):
            body = {"prompt": prompt, "client_id": client_id}
            async with session.post("/prompt", json=body) as answer:
                assert answer.status == 200, await answer.text()
            frames: list[bytes] = []
            is_running = True
            while is_running:
                message = await socket.receive(timeout=TIMEOUT_S)
                if message.type is aiohttp.WSMsgType.BINARY:
                    frames.append(message.data)
                else:
                    is_running = '"execution_success"' not in message.data
            assert [frame[:8].hex() for frame in frames] == ["0000000100000002"] * 3
            for frame in frames:
                picture = Image.open(io.BytesIO(frame[8:]))
                assert (picture.format, picture.size) == ("PNG", (96, 64))
                assert picture.getpixel((5, 5)) == (10, 20, 30)


async def test_an_upload_can_be_chosen_at_once(server: ServerProcess) -> None:
    """Its name is looked up among the loader's options right after the upload."""
    content = io.BytesIO()
    Image.new("RGB", (8, 8), (1, 2, 3)).save(content, "PNG")
    name = f"{uuid.uuid4().hex}.png"
    async with aiohttp.ClientSession(server.url) as session:
        for overwrite in ("true", "false", "1"):
            form = aiohttp.FormData()
            form.add_field("image", content.getvalue(), filename=name, content_type="image/png")
            form.add_field("overwrite", overwrite)
            form.add_field("type", "input")
            async with session.post("/upload/image", data=form) as answer:
                stored = await answer.json()
            assert stored == {"name": name, "subfolder": "", "type": "input"}
        async with session.get("/object_info/LoadImage") as answer:
            described = (await answer.json())["LoadImage"]["input"]["required"]["image"]
    options = described[0] if isinstance(described[0], list) else described[1]["options"]
    assert name in options


def test_what_is_wrong_with_a_prompt_is_json_with_a_message(server: ServerProcess) -> None:
    """Clients print `error.message` and the messages of each node."""
    wrong = flat(0)
    wrong["1"]["inputs"]["width"] = -5
    status, answer = server.post("/prompt", {"prompt": wrong})
    assert status == 400
    assert answer["error"]["type"] == "prompt_outputs_failed_validation"
    assert answer["error"]["message"]
    (error,) = answer["node_errors"]["1"]["errors"]
    assert (error["type"], error["extra_info"]["input_name"]) == ("value_smaller_than_min", "width")


@pytest.mark.parametrize("body", [b"", b"{}", b'{"prompt_id": null}'])
async def test_an_interrupt_without_an_id_stops_what_runs(
    server: ServerProcess, body: bytes
) -> None:
    """A poller sees the entry as an error, a listener sees `execution_interrupted`."""
    client_id = uuid.uuid4().hex
    async with (
        aiohttp.ClientSession(server.url) as session,
        session.ws_connect(f"/ws?clientId={client_id}") as socket,
    ):
        prompt = {"prompt": demo_prompt("a house", steps=HOURS), "client_id": client_id}
        async with session.post("/prompt", json=prompt) as answer:
            prompt_id = (await answer.json())["prompt_id"]
        kind = ""
        while kind != "progress":
            kind = (await next_frame(socket))["type"]
        async with session.post("/interrupt", data=body) as answer:
            assert (answer.status, await answer.read()) == (200, b"")
        while kind != "execution_interrupted":
            kind = (await next_frame(socket))["type"]
    status = (await asyncio.to_thread(server.wait, prompt_id))["status"]
    assert (status["status_str"], status["completed"]) == ("error", False)


def test_lists_that_clients_offer_are_where_they_look(server: ServerProcess) -> None:
    """Samplers, schedulers and models, by node and by folder."""

    def options(node: str, name: str) -> list[str]:
        described = server.get(f"/object_info/{node}")[node]["input"]["required"][name]
        found = described[0] if isinstance(described[0], list) else described[1]["options"]
        return list(found)

    assert {"euler", "dpmpp_2m"} <= set(options("KSampler", "sampler_name"))
    assert {"normal", "karras"} <= set(options("KSampler", "scheduler"))
    checkpoints = options("CheckpointLoaderSimple", "ckpt_name")
    assert checkpoints == server.get("/models/checkpoints")
    names = [row["name"] for row in server.get("/api/experiment/models/checkpoints")]
    assert sorted(names) == sorted(checkpoints)
    stats = server.get("/system_stats")
    assert stats["system"]["comfyui_version"].count(".") == 2
    assert all(device["vram_total"] >= device["vram_free"] > 0 for device in stats["devices"])
