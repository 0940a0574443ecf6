"""Queue, history, jobs, interrupt and free, over the real queue."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from comfy_execution.items import ExecutionStatus
from comfy_execution.queue import PromptQueue
from comfy_server import PromptServer
from comfy_server.routes import history
from tests.comfy_server.conftest import PROMPT, Start

Client = TestClient[Any, Any]


async def submit(client: Client, *ids: str) -> None:
    for prompt_id in ids:
        body = {"prompt": PROMPT, "prompt_id": prompt_id}
        assert (await client.post("/prompt", json=body)).status == 200


def queue_of() -> PromptQueue:
    return PromptServer.instance.prompt_queue


def finish(ending: str = "execution_success", outputs: dict[str, Any] | None = None) -> None:
    """Runs the next prompt to its end, as a worker would."""
    taken = queue_of().get(timeout=1)
    assert taken is not None
    item, key = taken
    data = {"prompt_id": item[1], "timestamp": 2000}
    messages = [["execution_start", {**data, "timestamp": 1000}], [ending, data]]
    success = ending == "execution_success"
    status = ExecutionStatus("success" if success else "error", success, messages)
    queue_of().task_done(key, {"outputs": outputs or {}, "meta": {}}, status)


async def pending(client: Client) -> list[str]:
    return [item[1] for item in (await (await client.get("/queue")).json())["queue_pending"]]


async def test_queue_edits_ignore_unknown_ids_and_answer_empty(client: Client) -> None:
    await submit(client, "a", "b", "c")
    answer = await client.post("/queue", json={"delete": ["b", "nope"]})
    assert (answer.status, await answer.read()) == (200, b"")
    assert await pending(client) == ["a", "c"]
    await client.post("/api/queue", json={"clear": True})
    assert await pending(client) == []


@pytest.mark.parametrize("path", ["/queue", "/history"])
@pytest.mark.parametrize("body", [b"[]", b"", b"nope", b'{"delete": "a"}', b'{"delete": [{}]}'])
async def test_malformed_edits_are_400_with_a_reason(
    client: Client, path: str, body: bytes
) -> None:
    answer = await client.post(path, data=body)
    assert answer.status == 400
    assert (await answer.json())["error"]


async def test_interrupt_takes_a_missing_or_malformed_body(client: Client) -> None:
    for body in (b"", b"junk", b"[]", b'{"prompt_id": "other"}'):
        answer = await client.post("/interrupt", data=body)
        assert (answer.status, await answer.read()) == (200, b"")


async def test_interrupt_by_id_hits_only_that_prompt(client: Client) -> None:
    hit: list[str] = []
    await submit(client, "a")
    queue_of().add_interrupt_listener(hit.append)
    queue_of().get(timeout=1)
    await client.post("/interrupt", json={"prompt_id": "b"})
    assert hit == []
    await client.post("/interrupt", json={"prompt_id": "a"})
    await client.post("/interrupt")
    assert hit == ["a", "a"]


async def test_free_sets_the_worker_flags(client: Client) -> None:
    await client.post("/free", json={"unload_models": True, "free_memory": False})
    assert queue_of().get_flags() == {"unload_models": True}


async def test_history_pages_and_forgets(client: Client) -> None:
    await submit(client, "a", "b", "c")
    for _ in range(3):
        finish(outputs={"2": {"images": []}})
    get = client.get
    assert list(await (await get("/history")).json()) == ["a", "b", "c"]
    assert list(await (await get("/history?max_items=2")).json()) == ["b", "c"]
    assert list(await (await get("/history?max_items=1&offset=0")).json()) == ["a"]
    one = await (await get("/history/b")).json()
    assert list(one) == ["b"]
    assert one["b"]["outputs"] == {"2": {"images": []}}
    assert one["b"]["status"]["status_str"] == "success"
    assert await (await get("/history/unknown")).json() == {}
    await client.post("/history", json={"delete": ["b", "unknown"]})
    assert list(await (await get("/history")).json()) == ["a", "c"]
    await client.post("/history", json={"clear": True})
    assert await (await get("/history")).json() == {}


@pytest.mark.parametrize(
    ("query", "left"), [("", ["d", "e"]), ("?max_items=4", ["d", "e"]), ("?offset=1", ["b", "c"])]
)
async def test_a_long_page_of_history_is_cut(
    client: Client, monkeypatch: pytest.MonkeyPatch, query: str, left: list[str]
) -> None:
    await submit(client, *"abcde")
    for _ in range(5):
        finish(outputs={"2": {"text": ["x" * 100_000]}})
    monkeypatch.setattr(history, "MAX_PAGE_BYTES", 250_000)
    assert list(await (await client.get(f"/history{query}")).json()) == left
    monkeypatch.setattr(history, "MAX_PAGE_BYTES", 1)
    assert len(await (await client.get(f"/history{query}")).json()) == 1


async def test_history_refuses_what_is_no_number(client: Client) -> None:
    answer = await client.get("/history?max_items=many")
    assert answer.status == 400
    assert "max_items" in (await answer.json())["error"]


async def test_jobs_show_every_status(client: Client) -> None:
    await submit(client, "done", "stopped", "failed", "running", "waiting")
    saved = {"images": [{"filename": "x.png", "subfolder": "", "type": "output"}]}
    finish(outputs={"2": saved})
    finish("execution_interrupted")
    finish("execution_error")
    queue_of().get(timeout=1)
    jobs = (await (await client.get("/api/jobs?sort_order=asc")).json())["jobs"]
    assert {job["id"]: job["status"] for job in jobs} == {
        "done": "completed",
        "stopped": "cancelled",
        "failed": "failed",
        "running": "in_progress",
        "waiting": "pending",
    }
    done = next(job for job in jobs if job["id"] == "done")
    assert done["preview_output"]["filename"] == "x.png"
    assert done["preview_output"]["mediaType"] == "images"
    assert (done["outputs_count"], done["previewable_outputs_count"]) == (1, 1)
    assert (done["execution_start_time"], done["execution_end_time"]) == (1000, 2000)


async def test_jobs_are_paged_as_the_editor_asks(client: Client) -> None:
    await submit(client, "a", "b", "c")
    query = "status=in_progress,pending&limit=2&offset=1&sort_by=created_at"
    page = await (await client.get(f"/api/jobs?{query}")).json()
    assert page["pagination"] == {"offset": 1, "limit": 2, "total": 3, "has_more": False}
    assert len(page["jobs"]) == 2


@pytest.mark.parametrize(
    "query", ["status=nope", "sort_by=size", "sort_order=up", "limit=0", "limit=x", "offset=x"]
)
async def test_a_bad_jobs_query_is_400(client: Client, query: str) -> None:
    answer = await client.get(f"/api/jobs?{query}")
    assert answer.status == 400
    assert (await answer.json())["error"]


async def test_one_job_in_full(client: Client) -> None:
    await submit(client, "a", "b")
    finish()
    done = await (await client.get("/api/jobs/a")).json()
    assert done["workflow"]["prompt"] == PROMPT
    assert done["execution_status"]["completed"] is True
    assert (await (await client.get("/api/jobs/b")).json())["workflow"]["prompt"] == PROMPT
    missing = await client.get("/api/jobs/none")
    assert (missing.status, await missing.json()) == (404, {"error": "Job not found"})
    assert (await client.get("/jobs")).status == 404


async def test_cancelling_one_job(client: Client) -> None:
    await submit(client, "a", "b")
    queue_of().get(timeout=1)
    for job_id, expected in (("a", True), ("b", True), ("c", False)):
        answer = await client.post(f"/api/jobs/{job_id}/cancel")
        assert (answer.status, await answer.json()) == (200, {"cancelled": expected})
    assert await pending(client) == []


async def test_cancelling_many_jobs(client: Client) -> None:
    await submit(client, "a", "b")
    answer = await client.post("/api/jobs/cancel", json={"job_ids": ["a", "zzz"]})
    assert await answer.json() == {"cancelled": True}
    assert await pending(client) == ["b"]
    assert (await client.post("/api/jobs/cancel", json={"job_ids": "a"})).status == 400
    answer = await client.post("/api/jobs/cancel", json={"job_ids": ["b", "../x", 4]})
    assert answer.status == 400
    assert (await answer.json())["invalid_ids"] == ["../x", 4]
    assert await pending(client) == ["b"]


async def test_bare_and_prefixed_routes_answer_alike(start: Start) -> None:
    client = await start()
    for path in ("/queue", "/history", "/features", "/users", "/settings", "/extensions"):
        bare, twin = await client.get(path), await client.get(f"/api{path}")
        assert (bare.status, await bare.json()) == (twin.status, await twin.json()), path
