"""POST /prompt: what is accepted, and what each refusal says."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from comfy_execution.items import NotStoredError
from comfy_server import PromptServer
from comfy_server.routes.queue import FEW
from tests.comfy_server.conftest import PROMPT, Start

Client = TestClient[Any, Any]


async def refusal(
    client: Client, path: str = "/prompt", **kwargs: Any
) -> tuple[int, dict[str, Any]]:
    answer = await client.post(path, **kwargs)
    body = await answer.json()
    assert body["node_errors"] == {}
    assert set(body["error"]) == {"type", "message", "details", "extra_info"}
    return answer.status, body["error"]


async def test_an_accepted_prompt_is_queued_and_numbered_from_zero(client: Client) -> None:
    first = await (await client.post("/prompt", json={"prompt": PROMPT, "client_id": "me"})).json()
    second = await (await client.post("/api/prompt", json={"prompt": PROMPT})).json()
    assert (first["number"], second["number"]) == (0, 1)
    assert first["node_errors"] == {}
    assert first["prompt_id"] != second["prompt_id"]
    queue = await (await client.get("/queue")).json()
    assert queue["queue_running"] == []
    number, prompt_id, prompt, extra, outputs = queue["queue_pending"][0]
    assert (number, prompt_id, prompt, outputs) == (0, first["prompt_id"], PROMPT, ["2"])
    assert extra["client_id"] == "me"
    assert extra["create_time"] > 1_600_000_000_000
    info = await (await client.get("/prompt")).json()
    assert info == {"exec_info": {"queue_remaining": 2}}


async def test_front_goes_before_and_a_given_number_does_not_count(client: Client) -> None:
    for body in ({}, {"number": 7.5}, {"front": True}):
        assert (await client.post("/prompt", json={"prompt": PROMPT, **body})).status == 200
    queue = await (await client.get("/queue")).json()
    assert [item[0] for item in queue["queue_pending"]] == [-1, 0, 7.5]


async def test_the_content_type_does_not_matter(client: Client) -> None:
    answer = await client.post("/prompt", data=json.dumps({"prompt": PROMPT}))
    assert answer.status == 200


async def test_secrets_are_shown_nowhere(client: Client) -> None:
    extra = {"api_key_comfy_org": "SECRET", "auth_token_comfy_org": "SECRET", "other": 1}
    await client.post("/prompt", json={"prompt": PROMPT, "extra_data": extra})
    for path in ("/queue", "/api/jobs", "/history"):
        assert "SECRET" not in await (await client.get(path)).text()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "empty"),
        (b"{not json", "line 1"),
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 100_000, "nested"),
        (b"[1]", "found a list"),
        (b'"text"', "found a string"),
        (b"true", "found a boolean"),
        (b"null", "found null"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"prompt": {"1": {"class_type": "A\\ud800"}}}', "surrogate"),
        (b'{"a": 1e999}', "out of range"),
    ],
)
async def test_a_body_that_is_no_json_object_is_told_so(
    client: Client, body: bytes, says: str
) -> None:
    status, error = await refusal(client, data=body)
    assert (status, error["type"]) == (400, "invalid_json")
    assert says in error["details"]


async def test_a_missing_prompt_has_the_recorded_answer(client: Client) -> None:
    status, error = await refusal(client, json={"client_id": "x"})
    assert status == 400
    assert error == {
        "type": "no_prompt",
        "message": "No prompt provided",
        "details": "No prompt provided",
        "extra_info": {},
    }


async def test_nodes_at_the_top_level_are_recognised(client: Client) -> None:
    _, error = await refusal(client, json=PROMPT)
    assert error["type"] == "no_prompt"
    assert '{"prompt": {...}}' in error["details"]


@pytest.mark.parametrize("wrap", [True, False])
async def test_an_editor_graph_is_recognised(client: Client, wrap: bool) -> None:
    graph: dict[str, Any] = {"nodes": [{"id": 1, "type": "EmptyImage"}], "links": [], "version": 1}
    _, error = await refusal(client, json={"prompt": graph} if wrap else graph)
    assert error["type"] == "invalid_prompt"
    assert "Export (API)" in error["details"]


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("prompt_id", "../x", "invalid_prompt_id"),
        ("prompt_id", 5, "invalid_prompt_id"),
        ("prompt_id", "a" * 500, "invalid_prompt_id"),
        ("number", "soon", "invalid_number"),
        ("number", [1], "invalid_number"),
        ("extra_data", [1], "invalid_extra_data"),
        ("client_id", {"a": 1}, "invalid_client_id"),
        ("partial_execution_targets", "2", "invalid_partial_execution_targets"),
        ("prompt", [1], "invalid_prompt"),
        ("prompt", None, "invalid_prompt"),
    ],
)
async def test_a_field_of_the_wrong_kind_is_named(
    client: Client, field: str, value: Any, kind: str
) -> None:
    status, error = await refusal(client, json={"prompt": PROMPT, field: value})
    assert (status, error["type"]) == (400, kind)
    assert error["details"]
    assert not re.search(r"\b(int|str|dict|NoneType|found list)\b", error["details"])


async def test_the_answer_of_the_validation_is_passed_on(client: Client) -> None:
    answer = await client.post("/prompt", json={"prompt": {}})
    assert answer.status == 400
    assert (await answer.json())["error"]["type"] == "prompt_no_outputs"


async def test_an_equal_prompt_with_the_same_id_is_queued_once(client: Client) -> None:
    body = {"prompt": PROMPT, "prompt_id": "mine"}
    assert (await client.post("/prompt", json=body)).status == 200
    assert (await client.post("/prompt", json=body)).status == 200
    assert (await (await client.get("/prompt")).json())["exec_info"]["queue_remaining"] == 1
    other = {**body, "prompt": {**PROMPT, "3": PROMPT["2"]}}
    answer = await client.post("/prompt", json=other)
    assert answer.status == 409
    assert (await answer.json())["error"]["type"] == "prompt_id_in_use"


async def test_handlers_of_packs_may_change_the_body_and_may_fail(start: Start) -> None:
    def prepare(server: PromptServer) -> None:
        server.add_on_prompt_handler(lambda body: 1 / 0)  # type: ignore[arg-type, return-value]
        server.add_on_prompt_handler(lambda body: {**body, "prompt": PROMPT})

    client = await start(prepare)
    assert (await client.post("/prompt", json={"prompt": {}})).status == 200


async def test_before_nodes_are_loaded_the_answer_says_wait(start: Start) -> None:
    client = await start(services={"validate": None})
    status, error = await refusal(client, json={"prompt": PROMPT})
    assert (status, error["type"]) == (503, "not_ready")


async def test_a_disk_that_refuses_is_a_503_that_says_so(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(given: list[Any]) -> list[Exception]:
        return [NotStoredError(item[1], OSError("disk full")) for item in given]

    monkeypatch.setattr(PromptServer.instance.prompt_queue, "submit_all", refuse)
    status, error = await refusal(client, json={"prompt": PROMPT, "prompt_id": "p"})
    assert (status, error["type"]) == (503, "not_stored")
    assert "disk full" in error["details"]


async def test_a_queue_of_very_many_prompts_takes_no_more(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comfy_server.routes.prompt.MOST_WAITING", 2)
    statuses = [(await client.post("/prompt", json={"prompt": PROMPT})).status for _ in range(3)]
    assert statuses == [200, 200, 503]
    answer = await client.post("/prompt", json={"prompt": PROMPT})
    assert (await answer.json())["error"]["type"] == "queue_full"
    await client.post("/queue", json={"clear": True})
    assert (await client.post("/prompt", json={"prompt": PROMPT})).status == 200


@pytest.mark.parametrize("path", ["/prompt", "/validate"])
async def test_a_prompt_of_too_many_nodes_is_refused_with_the_way_out(
    start: Start, path: str
) -> None:
    client = await start(max_prompt_nodes=2)
    assert (await client.post(path, json={"prompt": PROMPT})).status == 200
    larger = {**PROMPT, "3": PROMPT["1"]}
    status, error = await refusal(client, path, json={"prompt": larger})
    assert (status, error["type"]) == (413, "prompt_too_large")
    assert "3 nodes" in error["details"]
    assert "--max-prompt-nodes" in error["details"]
    unbounded = await start(max_prompt_nodes=0)
    assert (await unbounded.post(path, json={"prompt": larger})).status == 200


async def test_thousands_of_node_errors_are_told_as_few_are(start: Start) -> None:
    errors = {
        f"n{i}": {"errors": [], "dependent_outputs": [], "class_type": "A"} for i in range(5000)
    }
    summary = {"type": "t", "message": "é", "details": "", "extra_info": {}}
    client = await start(services={"validate": lambda *_: (False, summary, [], errors)})
    answer = await client.post("/prompt", json={"prompt": PROMPT})
    assert answer.status == 400
    assert await answer.json() == {"error": summary, "node_errors": errors}


async def test_a_large_prompt_is_listed_as_it_was_posted(client: Client) -> None:
    text = 'ü"\\' * 200_000
    extra = {"extra_pnginfo": {"workflow": {"id": "w", "text": text}}}
    posted = await client.post("/prompt", json={"prompt": PROMPT, "extra_data": extra})
    prompt_id = (await posted.json())["prompt_id"]
    (item,) = (await (await client.get("/queue")).json())["queue_pending"]
    assert (item[1], item[2]) == (prompt_id, PROMPT)
    assert item[3]["extra_pnginfo"] == extra["extra_pnginfo"]


async def test_very_many_waiting_prompts_are_listed_in_order(client: Client) -> None:
    ids = [f"p{number}" for number in range(FEW + 50)]
    for prompt_id in ids:
        body = {"prompt": PROMPT, "prompt_id": prompt_id}
        assert (await client.post("/prompt", json=body)).status == 200
    queue = await (await client.get("/queue")).json()
    assert [item[1] for item in queue["queue_pending"]] == ids
    jobs = await (await client.get("/api/jobs?limit=5")).json()
    assert jobs["pagination"]["total"] == len(ids)
    assert {job["status"] for job in jobs["jobs"]} == {"pending"}
