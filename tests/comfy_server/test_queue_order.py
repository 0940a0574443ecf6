"""Pausing, reordering, dry runs, and answers that wait for the result."""

from __future__ import annotations

import asyncio
from typing import Any

from comfy_execution.items import ExecutionStatus
from comfy_execution.planning import Plan
from comfy_server.services import SERVICES
from tests.comfy_server.conftest import PROMPT

SUCCESS = ExecutionStatus("success", True, [])


async def post(client: Any, path: str, body: Any = None, status: int = 200) -> Any:
    answer = await client.post(path, json=body if body is not None else {})
    assert answer.status == status, await answer.text()
    return await answer.json()


def queue_of(client: Any) -> Any:
    return client.server.app[SERVICES].queue


def finish(queue: Any) -> None:
    found = queue.get(timeout=1)
    queue.task_done(found[1], {"outputs": {"2": {"images": []}}, "meta": {}}, SUCCESS)


async def test_the_queue_is_held_and_reordered(start: Any) -> None:
    client = await start()
    for name in "abc":
        await post(client, "/prompt", {"prompt": PROMPT, "prompt_id": name})
    assert (await post(client, "/api/queue/pause"))["paused"]
    state = await post(client, "/api/queue/reorder", {"prompt_ids": ["c"]})
    assert state["pending"] == ["c", "a", "b"]
    state = await post(client, "/api/queue/priority", {"prompt_id": "b", "number": -5})
    assert state["pending"] == ["b", "c", "a"]
    await post(client, "/api/queue/priority", {"prompt_id": "no", "number": 1}, 404)
    await post(client, "/api/queue/priority", {"prompt_id": "b", "number": "x"}, 400)
    await post(client, "/api/queue/reorder", {"prompt_ids": 5}, 400)
    assert not (await post(client, "/api/queue/resume"))["paused"]
    assert (await post(client, "/api/queue/clear"))["pending"] == []
    assert (await (await client.get("/api/queue/state")).json())["running"] == []


async def test_a_dry_run_queues_nothing_and_takes_no_number(start: Any) -> None:
    async def plan(prompt: Any, outputs: list[str], extra: Any) -> Plan:
        return Plan(["1"], outputs, [])

    client = await start(services={"plan": plan})
    answer = await post(client, "/api/validate", {"prompt": PROMPT})
    assert answer["valid"]
    assert answer["plan"] == {"cached": ["1"], "would_run": ["2"], "unneeded": []}
    refused = await post(client, "/validate", {"prompt": {"1": PROMPT["1"]}})
    assert refused["error"]["type"] == "prompt_no_outputs"
    await post(client, "/validate", {}, 400)
    assert queue_of(client).get_tasks_remaining() == 0
    assert (await post(client, "/prompt", {"prompt": PROMPT}))["number"] == 0


async def test_an_answer_may_wait_for_the_result(start: Any) -> None:
    client = await start()
    asked = asyncio.create_task(post(client, "/prompt?wait=true", {"prompt": PROMPT}))
    await asyncio.to_thread(finish, queue_of(client))
    answer = await asked
    assert answer["history"]["status"]["status_str"] == "success"
    again = {"prompt": PROMPT, "prompt_id": answer["prompt_id"], "wait": True}
    assert "history" in await post(client, "/prompt", again)


async def test_a_waiting_request_learns_that_its_prompt_is_gone(
    start: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("comfy_server.completions.CHECK_S", 0.01)
    client = await start()
    asked = asyncio.create_task(
        post(client, "/prompt", {"prompt": PROMPT, "wait": True, "prompt_id": "x"})
    )
    while not queue_of(client).get_tasks_remaining():
        await asyncio.sleep(0.001)
    queue_of(client).wipe_queue()
    assert (await asked)["history"]["status"]["messages"][-1][0] == "execution_interrupted"
