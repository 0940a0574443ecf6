"""The main job at the public door: a prompt goes in, frames and a picture come out."""

from __future__ import annotations

import io
import json
from typing import Any

import aiohttp
import pytest
from PIL import Image

from tests.support.prompts import DEMO_CHECKPOINT, demo_prompt, plain_prompt
from tests.support.server_process import ServerProcess

FRAME_TIMEOUT_S = 60


async def frames_of(
    server: ServerProcess, prompt: dict[str, Any], flags: bool, **extra_data: Any
) -> list[Any]:
    """Runs `prompt`; returns every frame its owner receives: dicts for text, bytes for binary."""
    frames: list[Any] = []
    client_id = f"watcher-{flags}"
    async with (
        aiohttp.ClientSession(server.url) as session,
        session.ws_connect(f"/ws?clientId={client_id}") as socket,
    ):
        if flags:
            await socket.send_json(
                {"type": "feature_flags", "data": {"supports_preview_metadata": True}}
            )
        body = {"prompt": prompt, "client_id": client_id, "extra_data": extra_data}
        async with session.post("/prompt", json=body) as answer:
            assert answer.status == 200, await answer.text()
            prompt_id = (await answer.json())["prompt_id"]
        while True:
            message = await socket.receive(timeout=FRAME_TIMEOUT_S)
            if message.type is aiohttp.WSMsgType.BINARY:
                frames.append(message.data)
                continue
            frame = json.loads(message.data)
            frames.append(frame)
            data = frame["data"]
            if frame["type"] == "executing" and data["node"] is None:
                assert data["prompt_id"] == prompt_id
                break
    return frames


def test_the_picture_shows_what_the_text_says(server: ServerProcess) -> None:
    entry = server.run(demo_prompt("a red circle on a blue background"))
    assert entry["status"]["status_str"] == "success"
    picture = Image.open(io.BytesIO(server.picture(entry, "7"))).convert("RGB")
    assert picture.size == (128, 128)
    red, green, blue = picture.getpixel((64, 64))
    assert red > 150 > max(green, blue)
    red, green, blue = picture.getpixel((4, 4))
    assert blue > 120 > red


def test_the_saved_png_carries_prompt_and_workflow(server: ServerProcess) -> None:
    prompt = plain_prompt()
    workflow = {"id": "w", "nodes": []}
    entry = server.run(prompt, extra_data={"extra_pnginfo": {"workflow": workflow}})
    picture = Image.open(io.BytesIO(server.picture(entry, "2")))
    assert json.loads(picture.text["prompt"]) == prompt
    assert json.loads(picture.text["workflow"]) == workflow


async def test_frames_arrive_in_the_documented_order(server: ServerProcess) -> None:
    frames = await frames_of(server, demo_prompt(seed=7, steps=3), flags=True)
    names = [frame["type"] for frame in frames if isinstance(frame, dict)]
    assert names[0] == "status"
    start = names.index("execution_start")
    assert names[start + 1] == "execution_cached"
    assert names[start + 2 : start + 4] == ["progress_state", "executing"]
    assert names[-3:] == ["execution_success", "status", "executing"]
    steps = [f["data"] for f in frames if isinstance(f, dict) and f["type"] == "progress"]
    assert [(step["value"], step["max"]) for step in steps] == [(1, 3), (2, 3), (3, 3)]
    assert {step["node"] for step in steps} == {"5"}


async def test_a_client_that_understands_previews_gets_them(server: ServerProcess) -> None:
    frames = await frames_of(server, demo_prompt(seed=8, steps=4), flags=True)
    previews = [frame for frame in frames if isinstance(frame, bytes)]
    assert previews
    assert {int.from_bytes(frame[:4], "big") for frame in previews} == {4}
    length = int.from_bytes(previews[0][4:8], "big")
    metadata = json.loads(previews[0][8 : 8 + length])
    assert metadata["node_id"] == "5"
    assert max(Image.open(io.BytesIO(previews[0][8 + length :])).size) == 512


async def test_a_client_that_does_not_gets_them_only_if_it_asks(server: ServerProcess) -> None:
    unasked = await frames_of(server, demo_prompt(seed=9, steps=4), flags=False)
    assert not [frame for frame in unasked if isinstance(frame, bytes)]

    prompt = demo_prompt(seed=10, steps=4)
    asked = await frames_of(server, prompt, flags=False, preview_method="latent2rgb")
    previews = [frame for frame in asked if isinstance(frame, bytes)]
    assert {int.from_bytes(frame[:4], "big") for frame in previews} == {1}
    assert Image.open(io.BytesIO(previews[0][8:])).format == "JPEG"


def test_the_same_seed_gives_the_same_picture_again(server: ServerProcess) -> None:
    first = server.picture(server.run(demo_prompt(seed=5, steps=4)), "7")
    server.run(demo_prompt(seed=6, steps=4))
    again = server.picture(server.run(demo_prompt(seed=5, steps=4, prefix="again")), "7")
    pixels = [Image.open(io.BytesIO(data)).tobytes() for data in (first, again)]
    assert pixels[0] == pixels[1]


def test_an_unchanged_prompt_is_answered_from_the_cache(server: ServerProcess) -> None:
    prompt = demo_prompt(seed=11, steps=4, prefix="cached")
    server.run(prompt)
    entry = server.run(prompt)
    cached = dict(entry["status"]["messages"])["execution_cached"]["nodes"]
    assert set(cached) == set(prompt)
    assert entry["outputs"]["7"]["images"]


def test_models_that_ran_are_reported_with_their_bytes(server: ServerProcess) -> None:
    server.run(demo_prompt(seed=12, steps=2))
    held = {row["model"]: row for row in server.get("/api/memory")["models"]}
    assert held["BaseModel"]["size_bytes"] > 30_000_000
    server.post("/free", {"unload_models": True})
    server.run(plain_prompt(prefix="freed"))
    assert not [row for row in server.get("/api/memory")["models"] if row["loaded_bytes"]]


def test_the_editor_lists_the_demo_checkpoint(server: ServerProcess) -> None:
    info = server.get("/object_info/CheckpointLoaderSimple")["CheckpointLoaderSimple"]
    assert DEMO_CHECKPOINT in info["input"]["required"]["ckpt_name"][0]
    assert DEMO_CHECKPOINT in server.get("/api/models/checkpoints")


BAD_CHECKPOINTS = {
    "empty.safetensors": b"",
    "page.safetensors": b"<!DOCTYPE html><html><body>Sign in</body></html>" * 20,
    "pointer.safetensors": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "cut.safetensors": (2**20).to_bytes(8, "little") + b'{"a":',
}


@pytest.mark.parametrize("name", BAD_CHECKPOINTS)
def test_a_bad_checkpoint_is_named_and_the_next_prompt_runs(
    server: ServerProcess, name: str
) -> None:
    folder = server.base / "output" / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(BAD_CHECKPOINTS[name])
    server.get("/object_info/CheckpointLoaderSimple")
    entry = server.run(demo_prompt(checkpoint=name))
    kind, error = entry["status"]["messages"][-1]
    assert kind == "execution_error"
    assert error["node_id"] == "1"
    assert name in error["exception_message"]
    assert server.run(plain_prompt(prefix="after"))["status"]["status_str"] == "success"


BAD_PROMPTS: dict[str, Any] = {
    "text that is not JSON": b"{not json",
    "a list": [],
    "an editor graph": {"prompt": {"nodes": [], "links": []}},
    "no prompt": {"client_id": "x"},
    "an unknown class": {"prompt": {"1": {"class_type": "NoSuchNode", "inputs": {}}}},
    "a cycle": {
        "prompt": {
            "1": {"class_type": "ImageInvert", "inputs": {"image": ["2", 0]}},
            "2": {"class_type": "ImageInvert", "inputs": {"image": ["1", 0]}},
            "3": {"class_type": "PreviewImage", "inputs": {"images": ["2", 0]}},
        }
    },
    "a slot that does not exist": {
        "prompt": {
            "1": {"class_type": "EmptyImage", "inputs": {"width": 8, "height": 8, "batch_size": 1}},
            "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 7]}},
        }
    },
    "a node that is missing": {
        "prompt": {"2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}}}
    },
}


@pytest.mark.parametrize("kind", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_with_a_typed_error(server: ServerProcess, kind: str) -> None:
    status, answer = server.post("/prompt", BAD_PROMPTS[kind])
    assert status == 400
    assert answer["error"]["type"]
    assert answer["error"]["message"]
    assert isinstance(answer["node_errors"], dict | list)
