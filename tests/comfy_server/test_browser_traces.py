"""Records of the editor in a browser, and of refused prompts, replayed request by request.

Where the record shows a fault of the recorded server, or a value no two servers share, the table
`BETTER` says what is expected in its place. Browsers ask while news is on its way and output nodes
run in no fixed order, so frames are compared prompt by prompt as a set.
"""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientWebSocketResponse, FormData
from aiohttp.test_utils import TestClient

import folder_paths
from comfy_execution.executor import PromptExecutor
from comfy_execution.node_info import node_info
from comfy_execution.registry import NodeRegistry
from comfy_execution.validation import validate_prompt
from comfy_execution.worker import Worker
from comfy_server import PromptServer
from tests.comfy_execution.trace_nodes import trace_classes
from tests.comfy_server import trace_nodes
from tests.comfy_server.conftest import Start
from tests.comfy_server.test_traces import Flag, Replay
from tests.support.waiting import PATIENCE_S

Client = TestClient[Any, Any]
Json = dict[str, Any]

RANDOM = "abcde"
# method and beginning of a path -> the status that is right; its recorded answer does not count
BETTER = {
    "GET /api/jobs?status=completed,failed,cancelled": 200,
    "POST /api/jobs/": 200,
    "GET /api/jobs?status=in_progress": 200,  # whether the prompt still runs is a matter of time
    "GET /api/system_stats": 200,
    "GET /api/extensions": 200,
    "GET /api/i18n": 200,
    "GET /api/experiment/models": 200,
    "GET /internal/folder_paths": 200,
    "GET /internal/logs/raw": 200,
    "GET /user.css": 404,
    "GET /api/userdata/user.css": 404,
    "GET /testpack/remote": 404,
}
SMALL = ("progress_state", "status", "logs")  # not in every record, or not at a fixed place


class Loaded(trace_nodes._Node):
    """Stands for LoadImage: any file that was uploaded."""

    INPUTS = (("image", ("STRING",)),)

    def run(self, image: str) -> tuple[Any]:
        folder_paths.get_annotated_filepath(image)
        return (trace_nodes.PICTURE,)


class _Writing(trace_nodes._Saver):
    """Writes the files it shows, under the recorded names."""

    def save(self, name: str, kind: str) -> Json:
        name = f"ComfyUI_temp_{RANDOM}" if kind == "temp" else name
        shown = super().save(name, kind)
        directory = folder_paths.get_directory_by_type(kind)
        assert directory is not None
        trace_nodes.PICTURE.save(Path(directory, shown["ui"]["images"][0]["filename"]))
        return shown


class Saved(_Writing, trace_nodes.SaveImage):
    """Saves in output."""


class Previewed(_Writing, trace_nodes.PreviewImage):
    """Saves in temp."""


CLASSES = {
    **trace_nodes.NODES,
    "LoadImage": Loaded,
    "SaveImage": Saved,
    "PreviewImage": Previewed,
}


class Browser(Replay):
    """One recorded browser session against one running server."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.wanted: Counter[str] = Counter()
        self.got: Counter[str] = Counter()
        self.reader: asyncio.Task[None] | None = None

    def fill(self, text: str) -> str:
        known = {"<RAND5>": RANDOM, "<RAND>": "0.5", "<MS>": "1700000000000"}
        for placeholder, value in known.items():
            text = text.replace(placeholder, value)
        return super().fill(text)

    async def play(self, event: Json) -> None:
        kind = event["t"]
        if kind == "ws_open":
            socket = await self.client.ws_connect(self.fill(event["path"]))
            greeting = await socket.receive_json()
            self.names.setdefault("<SID:1>", greeting["data"]["sid"])
            if self.reader is not None:
                self.reader.cancel()
            self.reader = asyncio.create_task(self.follow(socket))
            self.sockets[event["sock"]] = socket
        elif kind == "ws>":
            await self.sockets[event["sock"]].send_json(event["msg"])
        elif kind == "ws<" and "msg" in event:
            self.note(self.wanted, event["msg"])
        elif kind == "http":
            await self.request(event)

    async def follow(self, socket: ClientWebSocketResponse) -> None:
        async for message in socket:
            self.note(self.got, json.loads(message.data))

    def note(self, frames: Counter[str], frame: Json) -> None:
        if frame["type"] not in SMALL:
            data = {k: v for k, v in frame["data"].items() if k not in ("timestamp", "nodes")}
            if frame["type"] == "feature_flags":
                data = {}
            text = self.fill(json.dumps([frame["type"], data], sort_keys=True))
            frames[re.sub(rf"(_temp_{RANDOM})_\d+", r"\1", text)] += 1

    async def request(self, event: Json) -> None:
        asked = f"{event['m']} {event['path']}"
        better = next((status for start, status in BETTER.items() if asked.startswith(start)), None)
        if better is not None:
            event = {**event, "status": better, "ct": None, "res": None}
        if "/upload/" in asked:
            await self.upload(event)
            return
        text = json.dumps(event.get("res"))
        if re.search(r"not wrapped|<(the stored|workflow|object|array)", text):
            event = {**event, "res": None}
        if event.get("ct") == "" or event["status"] == 404:
            event = {**event, "ct": None}
        if "size" in (event.get("res") or ()):
            event = {**event, "res": {"path": event["res"]["path"]}}
        await super().request(event)
        if asked == "POST /api/prompt" and event["status"] == 200:
            while PromptServer.instance.prompt_queue.get_tasks_remaining():
                await asyncio.sleep(0.005)

    async def upload(self, event: Json) -> None:
        form = FormData()
        name = self.fill(event["res"]["name"])
        with_alpha = trace_nodes.PICTURE.convert("RGBA")
        form.add_field("image", _png(with_alpha), filename=name)
        answer = await self.client.post(event["path"], data=form)
        assert await answer.json() == {**event["res"], "name": name}

    def check_frames(self) -> None:
        assert dict(self.got) == {self.fill(frame): count for frame, count in self.wanted.items()}


def _png(picture: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def lay_out(base: Path) -> None:
    """The pack and the model that the recorded server had."""
    pack = base / "custom_nodes/testpack"
    (pack / "web/docs").mkdir(parents=True)
    (pack / "web/test.js").write_text("// test")
    (pack / "web/docs/TestV3.md").write_text("# Test")
    (pack / "example_workflows").mkdir()
    (pack / "example_workflows/testflow.json").write_text("{}")
    models = base / "models/checkpoints"
    models.mkdir(parents=True)
    names = {"architecture": "sd", "author": "me", "title": "Demo title"}
    metadata = {f"modelspec.{key}": value for key, value in names.items()}
    header = json.dumps({"__metadata__": metadata}).encode()
    (models / "demo.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    trace_nodes.PICTURE.save(models / "demo.png")
    PromptServer.instance.packs.web_directories["testpack"] = str(pack / "web")
    (base / "user/default").mkdir(parents=True)


@pytest.fixture
async def working(start: Start, base: Path) -> AsyncIterator[Client]:
    """A server with the editor's files, stand-in nodes and a worker."""
    spec = importlib.util.find_spec("comfyui_frontend_package")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the editor is not installed")
    static = Path(next(iter(spec.submodule_search_locations))) / "static"
    registry = NodeRegistry(CLASSES)
    trace_nodes._Saver.counts.clear()

    async def validate(prompt_id: str, prompt: Any, targets: Any) -> Any:
        return await validate_prompt(prompt_id, prompt, targets, registry)

    def describe(class_type: str) -> Any:
        found = registry.get(class_type)
        assert found is not None
        return node_info(found)

    services = {"validate": validate, "node_info": describe, "node_names": lambda: list(CLASSES)}
    client = await start(services=services, frontend_root=static)
    lay_out(base)
    server, flag = PromptServer.instance, Flag()
    worker = Worker(server.prompt_queue, PromptExecutor(registry, server, flag))
    worker.start()
    yield client
    await asyncio.to_thread(worker.stop)


def completed(events: list[Json]) -> list[Json]:
    """The record with links that were shortened in it written out, less what cannot be replayed."""
    kept = []
    for event in events:
        if event.get("path") == "/api/prompt":
            prompt = event["req"]["prompt"]
            if event["status"] == 400:
                continue  # its links are lost, and with them what was wrong
            links = {"2": "5:4", "3": "1", "5:4": "1"} if "5:4" in prompt else {}
            for node_id, node in prompt.items():
                for name, value in node["inputs"].items():
                    if value == "[..]":
                        node["inputs"][name] = [links[node_id], 0]
        kept.append(event)
    return kept


@pytest.mark.parametrize("name", ["01_page_load_and_first_run", "08_panels_files_and_editors"])
async def test_a_browser_gets_what_it_got_or_better(
    working: Client, spec_folder: Path, name: str
) -> None:
    record = json.loads((spec_folder / f"traces/{name}.json").read_text())
    browser, events = Browser(working), completed(record["events"])
    if not any(event["t"] == "ws_open" for event in events):  # the page was open already
        await browser.play({"t": "ws_open", "sock": "T1", "path": "/ws"})
    for event in events:
        await browser.play(event)
    for _ in range(int(PATIENCE_S / 0.01)):
        if sum(browser.got.values()) >= sum(browser.wanted.values()):
            break
        await asyncio.sleep(0.01)
    browser.check_frames()


# -- refused prompts ----------------------------------------------------------------------------

CLEARER = {
    "link_missing_node": "linked_node_not_found",
    "link_missing_node_inner": "linked_node_not_found",
    "slot_oob": "linked_output_not_found",
    "no_inputs_key": "node_inputs_missing",
    "cycle": "dependency_cycle",
}
"""Cases in which the record shows an exception of that server's own code, or says nothing."""
STATUS = {"bad json body": 400}


def _comparable(answer: Json) -> Any:
    """An answer without numbers and ids that depend on the server, errors in a fixed order."""
    own = ("number", "prompt_id", "tooltip")
    plain = json.loads(
        json.dumps(answer), object_hook=lambda item: {k: item[k] for k in item if k not in own}
    )
    for node in plain.get("node_errors", {}).values():
        node["errors"].sort(key=lambda error: (error["type"], error["details"]))
    if isinstance(plain.get("error"), dict):
        plain["error"]["details"] = sorted(plain["error"]["details"].splitlines())
        plain["error"].pop("extra_info")  # ours may tell more
    return plain


async def test_every_refusal_is_the_recorded_one(start: Start, spec_folder: Path) -> None:
    info = json.loads((spec_folder / "object_info.json").read_text())
    registry = NodeRegistry(trace_classes(info))

    async def validate(prompt_id: str, prompt: Any, targets: Any) -> Any:
        return await validate_prompt(prompt_id, prompt, targets, registry)

    client = await start(services={"validate": validate})
    record = json.loads((spec_folder / "traces/04_validation_errors.json").read_text())
    case, seen = "", 0
    for event in record["events"]:
        if event["t"] == "note":
            case = event["text"]
            continue
        body = event.get("req")
        answer = await client.post(event["path"], data="{" if body is None else json.dumps(body))
        assert answer.status == STATUS.get(case, event["status"]), case
        found = await answer.json()
        if case in CLEARER:
            kinds = {e["type"] for node in found["node_errors"].values() for e in node["errors"]}
            assert kinds == {CLEARER[case]}, case
        elif case not in STATUS:
            assert _comparable(found) == _comparable(event["res"]), case
        seen += 1
    assert seen > 25
