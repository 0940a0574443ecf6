"""Recorded exchanges are replayed: the same requests must bring the same frames and answers.

Requests are sent in the order of the record; before each one the replayer waits until every frame
recorded before it has arrived. `TestSlow` takes a step only when the record says that its progress
frame is due, so nothing depends on time. Frames are compared per socket, in order; `status` frames
count as they race with the others.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType
from aiohttp.test_utils import TestClient

from comfy_execution.executor import PromptExecutor
from comfy_execution.node_info import node_info
from comfy_execution.registry import NodeRegistry
from comfy_execution.validation import validate_prompt
from comfy_execution.worker import Worker
from comfy_server import PromptServer
from tests.comfy_server import trace_nodes
from tests.comfy_server.conftest import Start
from tests.support.waiting import PATIENCE_S

Client = TestClient[Any, Any]
REGISTRY = NodeRegistry(trace_nodes.NODES)
# values the reference gets wrong (its own record says so), or that no two servers share
IGNORED_KEYS = {"number", "priority", "traceback", "timestamp", "executed", "current_outputs"}


class Flag:
    """The cancellation flag."""

    class Stopped(BaseException):
        pass

    exception = Stopped

    def __init__(self) -> None:
        self.is_on = False

    def set(self) -> None:
        self.is_on = True

    def clear(self) -> None:
        self.is_on = False

    def is_set(self) -> bool:
        return self.is_on


class Replay:
    """One record against one running server."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.sockets: dict[str, ClientWebSocketResponse] = {}
        self.expected: dict[str, list[Any]] = {}
        self.received: dict[str, list[Any]] = {}
        self.readers: list[asyncio.Task[None]] = []
        self.names: dict[str, str] = {}  # placeholder -> our id
        self.stepped: set[tuple[str, Any]] = set()

    async def run(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            await self.play(event)
        await self.settle()
        for reader in self.readers:
            reader.cancel()
        for name, frames in self.expected.items():
            self.compare(name, frames, self.received[name])

    async def play(self, event: dict[str, Any]) -> None:
        kind = event["t"]
        if kind == "ws_open":
            await self.settle()
            name = event["sock"]
            self.sockets[name] = await self.client.ws_connect(self.fill(event["path"]))
            self.expected[name], self.received[name] = [], []
            self.readers.append(asyncio.create_task(self.read(name)))
        elif kind == "ws>":
            await self.sockets[event["sock"]].send_json(event["msg"])
        elif kind == "ws<":
            await self.expect(event["sock"], event.get("msg") or {"bin": event["bin"]})
        elif kind == "ws_close":
            await self.settle()
            await self.sockets[event["sock"]].close()
        elif kind == "note" and event["text"].startswith("socket without"):
            await self.finish()
        elif kind == "http":
            await self.settle()
            await self.request(event)

    async def expect(self, name: str, frame: dict[str, Any]) -> None:
        step = slow_step(frame)
        if step is not None and step not in self.stepped:
            await self.settle()
            self.stepped.add(step)
            trace_nodes.STEP.release()
        self.expected[name].append(frame)

    async def read(self, name: str) -> None:
        async for message in self.sockets[name]:
            if message.type is WSMsgType.TEXT:
                self.received[name].append(json.loads(message.data))
            elif message.type is WSMsgType.BINARY:
                self.received[name].append({"bin": decode(message.data)})

    async def settle(self) -> None:
        """Waits until as many frames have arrived on each socket as are expected so far."""
        for _ in range(int(PATIENCE_S / 0.01)):
            if all(
                len(plain(self.received[name])) >= len(plain(frames))
                for name, frames in self.expected.items()
                if not self.sockets[name].closed
            ):
                return
            await asyncio.sleep(0.01)
        for name, frames in self.expected.items():
            self.compare(name, frames, self.received[name])

    async def finish(self) -> None:
        """Lets the running prompt go to its end, as the recorded one did unseen."""
        trace_nodes.STEP.release(100)
        while PromptServer.instance.prompt_queue.get_tasks_remaining():
            await asyncio.sleep(0.01)

    async def request(self, event: dict[str, Any]) -> None:
        path, body = self.fill(event["path"]), event.get("req")
        data = None if body is None else self.fill(json.dumps(body))
        answer = await self.client.request(event["m"], path, data=data)
        assert answer.status == event["status"], (event["m"], path, await answer.text())
        if event.get("ct"):
            assert answer.content_type == event["ct"]
        if answer.content_type == "application/json" and event.get("res") is not None:
            self.match(event["res"], await answer.json(), path)

    def fill(self, text: str) -> str:
        for placeholder, name in self.names.items():
            text = text.replace(placeholder, name)
        return text

    def compare(self, name: str, expected: list[Any], received: list[Any]) -> None:
        wanted, got = plain(expected), plain(received)
        for index, (want, have) in enumerate(zip(wanted, got)):
            self.match(want, have, f"{name}[{index}]")
        kinds = list(map(kind_of, wanted)), list(map(kind_of, got[: len(wanted)]))
        assert kinds[0] == kinds[1], (name, kinds)

    def match(self, want: Any, have: Any, where: str) -> None:
        """Asserts that `have` has everything `want` has; placeholders stand for any value."""
        if isinstance(want, str) and "<" in want:
            self.match_placeholder(want, have, where)
        elif isinstance(want, dict):
            assert isinstance(have, dict), where
            for placeholder, value in want.items():
                key = self.fill(placeholder)
                if key not in IGNORED_KEYS:
                    assert key in have, f"{where}.{key} is missing"
                    self.match(value, have[key], f"{where}.{key}")
        elif isinstance(want, list):
            assert isinstance(have, list), where
            assert len(want) == len(have), (where, want, have)
            is_item = len(want) == 5 and isinstance(want[0], int) and isinstance(want[2], dict)
            for index, (one, other) in enumerate(zip(want, have)):
                if is_item and index == 0:
                    continue  # the running number of the recorded server
                if is_item and index == 4:
                    one, other = sorted(one), sorted(other)  # the reference takes them from a set
                self.match(one, other, f"{where}[{index}]")
        else:
            assert want == have, (where, want, have)

    def match_placeholder(self, want: str, have: Any, where: str) -> None:
        if re.fullmatch(r"<(UUID|SID):\d+>", want):
            assert self.names.setdefault(want, have) == have, (where, want, have)
        elif want not in ("<MS>", "<INT>", "<S.FRACTION>", "<TENSOR_REPR>", "<TRACEBACK_LINE>"):
            pattern = re.escape(want).replace("<RAND5>", ".{5}")
            assert re.fullmatch(pattern, str(have)), (where, want, have)


def slow_step(frame: dict[str, Any]) -> tuple[str, Any] | None:
    """The step of TestSlow that a frame is the first to tell of; it counts in whole numbers."""
    if frame.get("type") != "progress_state":
        return None
    running = [
        (data["prompt_id"], data["value"])
        for data in frame["data"]["nodes"].values()
        if data["state"] == "running" and isinstance(data["value"], int) and data["value"] > 0
    ]
    return running[0] if running else None


def plain(frames: list[Any]) -> list[Any]:
    """The frames without those about the length of the queue."""
    return [frame for frame in frames if frame.get("type") != "status" or "sid" in frame["data"]]


def kind_of(frame: dict[str, Any]) -> str:
    return str(frame.get("type") or f"binary {frame['bin']['event']}")


def decode(frame: bytes) -> dict[str, Any]:
    """A binary frame in the form of the records."""
    event, second = struct.unpack_from(">II", frame)
    if event == 1:
        return {"event": 1, "image_format": second, "image_magic": frame[8:12].hex()}
    if event == 3:
        head = 8 + second
        text = frame[head:].decode()
        return {"event": 3, "node_id_len": second, "node_id": frame[8:head].decode(), "text": text}
    metadata = json.loads(frame[8 : 8 + second])
    magic = frame[8 + second :][:4].hex()
    return {"event": event, "metadata": metadata, "image_magic": magic}


def cut(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The record up to its browser part, sizes of binary frames left out."""
    kept: list[dict[str, Any]] = []
    last_interrupt = 0
    for event in events:
        if event["t"] == "note" and "browser" in event["text"]:
            break
        if "TestAsync" in json.dumps(event.get("req")):
            break  # which of its two ready nodes starts is not fixed
        if "bin" in event:
            event["bin"] = {
                key: value
                for key, value in event["bin"].items()
                if key not in ("total_len", "metadata_len")
            }
        if event.get("path", "").startswith("/api/jobs"):
            event.pop("res", None)  # the reference calls an interrupted job failed
        if event.get("req") == {"clear": True} and event["path"] == "/queue":
            # the recorded worker was slow enough for this to come before its next prompt
            kept.insert(last_interrupt, event)
            continue
        if event.get("path") == "/interrupt":
            last_interrupt = len(kept)
        kept.append(event)
    return kept


async def prepare(client: Client, events: list[dict[str, Any]]) -> None:
    """Makes the image that the recorded server still had from the record before."""
    cached = (
        event["msg"]["data"]["nodes"]
        for event in events
        if event.get("msg", {}).get("type") == "execution_cached"
    )
    if not next(cached):
        return
    sizes = {"width": 64, "height": 64, "batch_size": 1, "color": 255}
    prompt = {
        "1": {"class_type": "EmptyImage", "inputs": sizes},
        "9": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }
    body = {"prompt": prompt, "prompt_id": "before"}
    assert (await client.post("/prompt", json=body)).status == 200
    while await (await client.get("/history/before")).json() == {}:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "name",
    [
        "02_prompt_success_and_cached_rerun",
        "03_legacy_preview_client",
        "05_execution_error_expansion_blocker_async",
        "06_queue_interrupt_history_two_clients",
        "07_reconnect",
    ],
)
async def test_a_recorded_exchange_comes_out_the_same(
    start: Start, spec_folder: Path, name: str
) -> None:
    trace_nodes._Saver.counts.clear()
    while trace_nodes.STEP.acquire(blocking=False):
        pass

    async def validate(prompt_id: str, prompt: Any, targets: Any) -> Any:
        return await validate_prompt(prompt_id, prompt, targets, REGISTRY)

    def describe(class_type: str) -> Any:
        spec = REGISTRY.get(class_type)
        assert spec is not None
        return node_info(spec)

    client = await start(
        services={
            "validate": validate,
            "node_info": describe,
            "node_names": lambda: list(trace_nodes.NODES),
        }
    )
    server, flag = PromptServer.instance, Flag()
    server.prompt_queue.interrupt_flag = flag
    worker = Worker(server.prompt_queue, PromptExecutor(REGISTRY, server, flag))
    worker.start()
    record = json.loads((spec_folder / f"traces/{name}.json").read_text())
    events = cut(record["events"])
    try:
        await prepare(client, events)
        await Replay(client).run(events)
    finally:
        flag.set()
        await asyncio.to_thread(worker.stop)
