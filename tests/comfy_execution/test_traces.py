"""Recorded exchanges, replayed: the same prompts give the same frames, history and errors."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from comfy_execution import events, jobs
from comfy_execution.executor import PromptExecutor
from comfy_execution.queue import PromptQueue
from comfy_execution.registry import NodeRegistry
from comfy_execution.validation import validate_prompt
from comfy_execution.worker import Worker
from tests.comfy_execution.support import Recorder
from tests.comfy_execution.trace_nodes import trace_classes

Json = dict[str, Any]

REPLACED_BY_CLEARER_TEXT = {
    "link_missing_node": "linked_node_not_found",
    "link_missing_node_inner": "linked_node_not_found",
    "slot_oob": "linked_output_not_found",
    "no_inputs_key": "node_inputs_missing",
}
"""Cases in which the record shows an exception of the reference's own code."""


@pytest.fixture(scope="module")
def trace(spec_folder: Path) -> Any:
    def read(name: str) -> list[Json]:
        found: list[Json] = json.loads((spec_folder / "traces" / name).read_text())["events"]
        return found

    return read


@pytest.fixture(scope="module")
def registry(spec_folder: Path) -> NodeRegistry:
    info = json.loads((spec_folder / "object_info.json").read_text())
    return NodeRegistry(trace_classes(info))


@pytest.fixture(scope="module")
def spec_folder() -> Path:
    folder = Path(__file__).resolve().parents[3] / "shared" / "spec"
    if not folder.is_dir():
        pytest.skip(f"interface records not found at {folder}")
    return folder


def wire(event: events.Event) -> Json | None:
    """An event as the socket of client-A, which negotiated metadata, would get it."""
    if event.client_id not in (None, "client-A") or not (event.client_id or event.broadcast):
        return None
    if isinstance(event, events.Preview):
        if event.metadata is None:
            return None
        return {"bin": {"event": 4, "metadata": event.payload() | {"image_type": "image/jpeg"}}}
    if isinstance(event, events.ProgressText):
        return {"bin": {"event": 3, "node_id": event.node_id, "text": event.text}}
    return {"msg": {"type": event.name, "data": event.payload()}}


def normal(value: Any, key: str = "") -> Any:
    """Values without what differs between any two runs."""
    if isinstance(value, dict):
        return {name: normal(item, name) for name, item in value.items()}
    if key in ("timestamp", "create_time", "execution_start_time", "execution_end_time"):
        return "<MS>"
    if key == "traceback":
        return bool(value)
    if isinstance(value, (list, tuple)):
        return [normal(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(_temp_<RAND5>)_\d{5}_", r"\1_", value)
    return value


def recorded_frames(trace: list[Json], start: int) -> list[Json]:
    """What client A received after the request at this place, until the prompt ended."""
    frames = []
    for entry in trace[start:]:
        if entry["t"] != "ws<":
            continue
        if "bin" in entry:
            kept = ("event", "metadata", "node_id", "text")
            frames.append({"bin": {k: v for k, v in entry["bin"].items() if k in kept}})
        else:
            frames.append({"msg": entry["msg"]})
            if entry["msg"]["type"] == "executing" and entry["msg"]["data"]["node"] is None:
                break
    return frames


class Replay:
    """Queue, worker and executor over the stand-in nodes."""

    def __init__(self, registry: NodeRegistry) -> None:
        self.sink = Recorder()
        self.registry = registry
        self.queue = PromptQueue(self.sink)
        self.executor = PromptExecutor(registry, self.sink)
        self.worker = Worker(self.queue, self.executor)

    def post(self, request: Json, prompt_id: str, number: float, outputs: list[str]) -> list[Json]:
        """Queues and runs a prompt in this thread; returns the frames."""
        self.sink.events.clear()
        prompt = json.loads(json.dumps(request["prompt"]))
        checked = asyncio.run(validate_prompt(prompt_id, prompt, None, self.registry))
        assert sorted(checked.outputs) == sorted(outputs)
        extra = {**request.get("extra_data", {}), "create_time": 1}
        extra["client_id"] = request["client_id"]
        self.queue.put((number, prompt_id, prompt, extra, outputs))
        found = self.queue.get(timeout=1)
        assert found is not None
        self.worker._run_prompt(*found)
        return [frame for event in self.sink.events if (frame := wire(event)) is not None]


def replay(trace: list[Json], registry: NodeRegistry, before: Json | None = None) -> Replay:
    """Posts every prompt of a trace and compares frames, history and job records."""
    run = Replay(registry)
    if before is not None:
        run.post({"prompt": before, "client_id": "client-A"}, "before", -1, list(before)[-1:])
    for place, entry in enumerate(trace):
        if entry.get("m") == "POST" and entry["path"] == "/prompt":
            answer = entry["res"]
            path = f"/history/{answer['prompt_id']}"
            history = next((e["res"] for e in trace[place:] if e.get("path") == path), None)
            outputs = (
                history[answer["prompt_id"]]["prompt"][4] if history is not None else ["4", "3"]
            )
            frames = run.post(entry["req"], answer["prompt_id"], answer["number"], outputs)
            assert normal(frames) == normal(recorded_frames(trace, place))
        elif entry.get("m") == "GET" and entry["path"].startswith("/history/"):
            prompt_id = entry["path"].removeprefix("/history/")
            found = run.queue.get_history(prompt_id)
            found[prompt_id].pop("nodes")
            assert normal(found) == normal(entry["res"])
        elif entry.get("m") == "GET" and entry["path"].startswith("/api/jobs/"):
            prompt_id = entry["path"].removeprefix("/api/jobs/")
            details = jobs.job_details(prompt_id, run.queue.get_history(prompt_id)[prompt_id])
            details.pop("nodes")
            details.pop("previewable_outputs_count")
            assert normal(details) == normal(entry["res"])
    return run


def test_success_previews_and_cached_rerun(trace: Any, registry: NodeRegistry) -> None:
    replay(trace("02_prompt_success_and_cached_rerun.json"), registry)


def test_failure_expansion_blocker_and_async(trace: Any, registry: NodeRegistry) -> None:
    inputs = {"width": 64, "height": 64, "batch_size": 1, "color": 255}
    before = {
        "1": {"class_type": "EmptyImage", "inputs": inputs},
        "3": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
    }
    events_of_trace = trace("05_execution_error_expansion_blocker_async.json")
    text = json.dumps(events_of_trace).replace("<TENSOR_REPR>", "EmptyImage 0")
    replay(json.loads(text), registry, before)


def cases_of(trace: list[Json]) -> list[tuple[str, Json]]:
    found, name = [], ""
    for entry in trace:
        if entry["t"] == "note":
            name = entry["text"]
        elif "prompt" in entry.get("req", {}):
            found.append((name, entry))
    return found


def test_every_recorded_validation(trace: Any, registry: NodeRegistry) -> None:
    for name, entry in cases_of(trace("04_validation_errors.json")):
        request = json.loads(json.dumps(entry["req"]))
        result = asyncio.run(
            validate_prompt(
                "id", request["prompt"], request.get("partial_execution_targets"), registry
            )
        )
        assert result.valid == (entry["status"] == 200), name
        if name == "cycle":
            assert set(result.node_errors) == {"1", "2"}
            continue
        compare_errors(name, result.node_errors, entry["res"]["node_errors"])
        if entry["status"] != 200 and name not in REPLACED_BY_CLEARER_TEXT:
            expected = entry["res"]["error"]
            assert result.error is not None
            for key in ("type", "message"):
                assert result.error[key] == expected[key], name
            assert sorted(result.error["details"].split("\n")) == sorted(
                expected["details"].split("\n")
            ), name


def compare_errors(name: str, found: Json, expected: Json) -> None:
    assert set(found) == set(expected), name
    for node_id, entry in expected.items():
        mine = found[node_id]
        assert mine["class_type"] == entry["class_type"], name
        assert mine["dependent_outputs"] == entry["dependent_outputs"], name
        if name in REPLACED_BY_CLEARER_TEXT:
            assert [e["type"] for e in mine["errors"]] == [REPLACED_BY_CLEARER_TEXT[name]]
            continue
        assert sorted(map(essence, mine["errors"])) == sorted(map(essence, entry["errors"])), name


def essence(error: Json) -> str:
    """An error without tooltips and option lists, which the recorded nodes had differently."""
    extra = dict(error["extra_info"])
    config = extra.pop("input_config", None)
    if config is not None:
        extra["type"] = "COMBO" if isinstance(config[0], list) else config[0]
    details = re.sub(r"list of length \d+|in \[.*\]", "list", error["details"])
    return json.dumps([error["type"], error["message"], details, extra], sort_keys=True)
