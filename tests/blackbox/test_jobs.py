"""The queue, the history and the jobs that the editor lists."""

from __future__ import annotations

import gzip
import json
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from comfy_execution.graph_utils import GraphBuilder
from tests.blackbox.client import Client, fresh, graph
from tests.blackbox.conftest import House, only_classic
from tests.support.server_process import ServerProcess

pytestmark = only_classic


@pytest.fixture
def server(house: House) -> ServerProcess:
    return house.server


@pytest.fixture
def held(server: ServerProcess) -> Iterator[ServerProcess]:
    """The queue holds its prompts back until `release`; it is empty at the end."""
    server.post("/api/queue/pause", {})
    yield server
    server.post("/api/queue/clear", {})
    server.post("/api/queue/resume", {})


def show(value: Any = None) -> GraphBuilder:
    """A graph that shows a number."""
    g = graph()
    g.node("TrialShow", value=fresh() if value is None else value)
    return g


def fail() -> GraphBuilder:
    """A graph that fails."""
    g = graph()
    g.node("TrialShow", value=g.node("TrialRaise", value=1, kind="ValueError").out(0))
    return g


def pending(server: ServerProcess) -> list[str]:
    return [item[1] for item in server.get("/queue")["queue_pending"]]


def test_waiting_prompts_are_listed_in_order(client: Client, held: ServerProcess) -> None:
    last = client.queue(show(), number=9e9)
    first = client.queue(show())
    second = client.queue(show())
    front = client.queue(show(), front=True)
    assert pending(held) == [front, first, second, last]
    assert held.get("/prompt")["exec_info"]["queue_remaining"] == 4
    number, prompt_id, prompt, extra_data, outputs = held.get("/queue")["queue_pending"][1]
    assert (prompt_id, outputs) == (first, ["1"])
    assert prompt["1"]["class_type"] == "TrialShow"
    assert extra_data["client_id"] == client.client_id
    assert extra_data["create_time"] > 1e12
    assert isinstance(number, (int, float))


def test_waiting_prompts_are_reordered_and_taken_out(client: Client, held: ServerProcess) -> None:
    ids = [client.queue(show()) for _ in range(4)]
    status, state = held.post("/api/queue/reorder", {"prompt_ids": [ids[3], ids[1]]})
    assert (status, state["pending"]) == (200, [ids[3], ids[1], ids[0], ids[2]])
    held.post("/queue", {"delete": [ids[1], "nobody"]})
    assert pending(held) == [ids[3], ids[0], ids[2]]
    held.post("/queue", {"clear": True})
    assert pending(held) == []
    for prompt_id in ids:  # who polls for one learns of it; no list shows what never ran
        status = held.get(f"/history/{prompt_id}")[prompt_id]["status"]
        assert (status["status_str"], status["completed"]) == ("error", False)
        assert prompt_id not in held.get("/history")


def test_jobs_of_every_status(client: Client, held: ServerProcess) -> None:
    waiting, cancelled = client.queue(show()), client.queue(show())
    assert held.post(f"/api/jobs/{cancelled}/cancel", {}) == (200, {"cancelled": True})
    statuses = {waiting: "pending", cancelled: "cancelled"}
    for job_id, status in statuses.items():
        job = held.get(f"/api/jobs/{job_id}")
        assert (job["id"], job["status"]) == (job_id, status)
        assert job["create_time"] > 1e12
    listed = [item["id"] for item in held.get("/api/jobs")["jobs"]]
    assert waiting in listed
    assert cancelled not in listed  # as it never ran, it is gone from the editor's lists
    assert held.post(f"/api/jobs/{cancelled}/cancel", {}) == (200, {"cancelled": False})


def test_finished_jobs(client: Client, server: ServerProcess) -> None:
    g = graph()
    picture = g.node("TrialPicture", shade="white", width=8, height=8, count=1)
    saved = g.node("SaveImage", id="saved", images=picture.out(0), filename_prefix="job")
    workflow = {"id": str(uuid.uuid4())}
    done = client.run(g, extra_data={"extra_pnginfo": {"workflow": workflow}})
    failed = client.run(fail())
    job = server.get(f"/api/jobs/{done.prompt_id}")
    assert job["status"] == "completed"
    assert job["outputs"] == done.entry["outputs"]
    assert job["outputs_count"] == 1
    assert job["preview_output"]["nodeId"] == saved.id
    assert job["execution_start_time"] <= job["execution_end_time"]
    assert job["workflow"]["prompt"] == g.finalize()
    mine = server.get(f"/api/jobs?workflow_id={workflow['id']}")
    assert [item["id"] for item in mine["jobs"]] == [done.prompt_id]
    other = server.get(f"/api/jobs/{failed.prompt_id}")
    assert other["status"] == "failed"
    assert other["execution_error"]["exception_type"] == "ValueError"


def test_jobs_are_filtered_sorted_and_paged(client: Client, server: ServerProcess) -> None:
    ids = [client.run(show()).prompt_id for _ in range(3)]
    page = server.get("/api/jobs?status=completed&limit=2&offset=0")
    assert [job["id"] for job in page["jobs"]] == ids[:0:-1]
    assert page["pagination"]["has_more"]
    following = server.get("/api/jobs?status=completed&limit=2&offset=2")
    assert following["jobs"][0]["id"] == ids[0]
    oldest = server.get("/api/jobs?status=completed&sort_order=asc")["jobs"]
    assert [job["id"] for job in oldest][-3:] == ids
    times = [
        job["execution_end_time"] - job["execution_start_time"]
        for job in server.get("/api/jobs?status=completed&sort_by=execution_duration")["jobs"]
    ]
    assert times == sorted(times, reverse=True)


def test_a_job_nobody_knows_is_404(client: Client, server: ServerProcess) -> None:
    from urllib.error import HTTPError

    with pytest.raises(HTTPError) as error:
        server.get(f"/api/jobs/{uuid.uuid4()}")
    assert error.value.code == 404
    error.value.close()
    assert server.post(f"/api/jobs/{uuid.uuid4()}/cancel", {}) == (200, {"cancelled": False})
    done = client.run(show()).prompt_id
    status, _ = server.post("/api/queue/priority", {"prompt_id": done, "number": 1})
    assert status == 409
    status, _ = server.post("/api/queue/priority", {"prompt_id": "nobody", "number": 1})
    assert status == 404


def test_the_same_id_twice(client: Client, held: ServerProcess) -> None:
    prompt_id, value = str(uuid.uuid4()), fresh()
    assert client.queue(show(value), prompt_id=prompt_id) == prompt_id
    assert client.queue(show(value), prompt_id=prompt_id) == prompt_id
    assert pending(held) == [prompt_id]
    status, answer = client.submit(show(), prompt_id=prompt_id)
    assert status == 409
    assert prompt_id in answer["error"]["details"]
    held.post("/api/queue/resume", {})
    assert client.follow(prompt_id).succeeded
    status, _ = client.submit(show(), prompt_id=prompt_id)
    assert status == 409
    assert client.queue(show(value), prompt_id=prompt_id) == prompt_id


def test_history_is_read_paged_and_deleted(client: Client, server: ServerProcess) -> None:
    ids = [client.run(show()).prompt_id for _ in range(3)]
    assert list(server.get("/history?max_items=2")) == ids[1:]
    everything = list(server.get("/history"))
    assert everything[-3:] == ids
    assert list(server.get("/history?offset=0&max_items=1")) == everything[:1]
    server.post("/history", {"delete": [ids[0]]})
    assert server.get(f"/history/{ids[0]}") == {}
    assert list(server.get("/history"))[-2:] == ids[1:]


def test_a_long_history_is_sent_compressed_to_who_takes_it(
    client: Client, server: ServerProcess
) -> None:
    client.run(show(), extra_data={"note": "long " * 10_000})
    request = urllib.request.Request(server.url + "/history?max_items=1")
    request.add_header("Accept-Encoding", "gzip")
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.headers["Content-Encoding"] == "gzip"
        body = answer.read()
    assert len(body) < 5000
    assert json.loads(gzip.decompress(body)) == server.get("/history?max_items=1")


def test_an_answer_that_waits_for_the_result(server: ServerProcess) -> None:
    value = fresh()
    body = {"prompt": show(value).finalize(), "wait": True}
    status, answer = server.post("/prompt", body)
    assert status == 200
    assert answer["history"]["outputs"]["1"]["value"] == [value]


def test_a_job_tells_time_and_cache_of_each_node(client: Client, server: ServerProcess) -> None:
    g = show()
    client.run(g)
    nodes = server.get(f"/api/jobs/{client.run(g).prompt_id}")["nodes"]
    assert nodes["1"]["cached"] is True
