"""The OpenAPI document: complete, true of every route, and held against the running server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

from comfy_server import PromptServer, ServerOptions
from comfy_server.describe import ATTRIBUTE
from comfy_server.routes import ALL_ROUTES
from comfy_server.serving import running
from tests.comfy_server.conftest import Start, make_server
from tests.support.waiting import PATIENCE_S

Client = TestClient[Any, Any]


async def test_the_document_lists_every_route_once(client: Client) -> None:
    document = await (await client.get("/api/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    paths = document["paths"]
    preview = "/experiment/models/preview/{folder}/{path_index}/{filename}"
    for path in ("/prompt", "/queue", "/api/jobs/{job_id}/cancel", "/internal/logs/raw", preview):
        assert path in paths, path
    assert "/api/prompt" not in paths
    assert set(paths["/prompt"]) == {"get", "post"}


def test_every_handler_of_ours_is_described() -> None:
    bare = [
        f"{route.handler.__module__}.{route.handler.__name__}"
        for table in ALL_ROUTES
        for route in table
        if isinstance(route, web.RouteDef) and not hasattr(route.handler, ATTRIBUTE)
    ]
    assert bare == []


async def test_routes_of_packs_are_listed_too(start: Start) -> None:
    def prepare(server: PromptServer) -> None:
        @server.routes.post("/pack/{name}/run")
        async def run(request: web.Request) -> web.Response:
            """Runs it."""
            return web.Response()

    client = await start(prepare)
    document = await (await client.get("/api/openapi.json")).json()
    listed = document["paths"]["/pack/{name}/run"]["post"]
    assert (listed["summary"], listed["tags"]) == ("Runs it.", ["packs"])


EXAMPLES = 12


class Background:
    """A server on its own thread, for a test tool that calls it from outside."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._ready = threading.Event()
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    async def _run(self) -> None:
        server = make_server(self._options)
        server.add_routes()
        async with running(server) as listeners:
            self.url = listeners[0].url
            self._ready.set()
            await self._ended.wait()

    def __enter__(self) -> Background:
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(PATIENCE_S)
        self._loop.close()


@pytest.fixture
def background(options: ServerOptions, base: Path) -> Iterator[Background]:
    (base / "output/a.png").write_bytes(b"x")
    with Background(options) as server:
        yield server


@pytest.mark.slow
def test_the_running_server_keeps_to_its_document(background: Background) -> None:
    """Every operation is called with made-up input, good and bad; no answer may surprise."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from schemathesis.checks import load_all_checks
    from schemathesis.specs.openapi import checks

    load_all_checks()
    wanted = [
        schemathesis.checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_url(f"{background.url}/api/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in ("/ws", "/login"):
            continue  # no plain answer; ten attempts a minute

        @seed(1)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            case.call_and_validate(base_url=background.url, checks=wanted, timeout=PATIENCE_S)

        check()


async def test_the_document_is_strict_json(client: Client) -> None:
    text = await (await client.get("/api/openapi.json")).text()
    assert json.loads(text)["info"]["license"]["identifier"] == "Apache-2.0"
