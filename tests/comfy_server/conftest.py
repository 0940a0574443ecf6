"""A server on real sockets with the real queue, three small nodes and no worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

import folder_paths
from comfy_execution.queue import PromptQueue
from comfy_server import PromptServer, ServerOptions, Services

NODES = {
    "EmptyImage": {"output_node": False},
    "SaveImage": {"output_node": True},
    "Ünïcode | Node (1/2)": {"output_node": False},
}
PROMPT = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64}},
    "2": {"class_type": "SaveImage", "inputs": {"images": ["1", 0]}},
}


@pytest.fixture
def base(tmp_path: Path) -> Iterator[Path]:
    """An installation root of its own, with input, output, temp and user folders."""
    rows = folder_paths.folder_names_and_paths.items()
    table = {name: (list(row[0]), row[1]) for name, row in rows}
    old = folder_paths.base_path
    folder_paths.set_base_directory(str(tmp_path))
    for name in ("input", "output", "temp"):
        (tmp_path / name).mkdir()
    yield tmp_path
    folder_paths.set_base_directory(old)
    folder_paths.folder_names_and_paths.clear()
    folder_paths.folder_names_and_paths.update(table)
    folder_paths.filename_list_cache.clear()


@pytest.fixture
def frontend(base: Path) -> Path:
    """A page as small as can be, laid out like the editor's."""
    root = base / "frontend"
    (root / "extensions/core").mkdir(parents=True)
    (root / "assets").mkdir()
    (root / "index.html").write_text("<html>editor</html>")
    (root / "assets/app.js").write_text("// app")
    (root / "assets/picture.png").write_bytes(b"\x89PNG")
    (root / "extensions/core/one.js").write_text("// core")
    return root


def validate(
    prompt_id: str, prompt: dict[str, Any], targets: list[str] | None
) -> tuple[bool, dict[str, Any] | None, list[str], dict[str, Any]]:
    """Accepts prompts that have an output node; the real validation has its own tests."""
    outputs = [
        node_id
        for node_id, node in prompt.items()
        if NODES.get(node.get("class_type"), {}).get("output_node")
        and (targets is None or node_id in targets)
    ]
    if outputs:
        return True, None, outputs, {}
    error = {
        "type": "prompt_no_outputs",
        "message": "Prompt has no outputs",
        "details": "",
        "extra_info": {},
    }
    return False, error, [], {}


def node_info(name: str) -> dict[str, Any]:
    """A minimal /object_info entry."""
    return {"name": name, "input": {"required": {}}, **NODES[name]}


def make_server(options: ServerOptions, **services: Any) -> PromptServer:
    """A server whose routes are added."""
    given: dict[str, Any] = {
        "node_names": lambda: list(NODES),
        "node_info": node_info,
        "validate": validate,
        **services,
    }
    loop = asyncio.get_running_loop()
    return PromptServer(loop, options, Services(PromptQueue(), **given))


@pytest.fixture
def options(frontend: Path) -> ServerOptions:
    """Options of the ordinary single-user server."""
    return ServerOptions(frontend_root=frontend, port=0, preview_interval_s=0.0)


Start = Callable[..., Any]


@pytest.fixture
async def start(options: ServerOptions) -> AsyncIterator[Start]:
    """Starts servers: `client = await start(multi_user=True)`; `client.server.app` is its app."""
    clients: list[TestClient[Any, Any]] = []

    async def begin(
        prepare: Callable[[PromptServer], None] | None = None,
        services: dict[str, Any] | None = None,
        **changes: Any,
    ) -> TestClient[Any, Any]:
        server = make_server(replace(options, **changes), **(services or {}))
        if prepare is not None:
            prepare(server)
        server.add_routes()
        client = TestClient(TestServer(server.app))
        await client.start_server()
        clients.append(client)
        return client

    yield begin
    for client in clients:
        await client.close()


@pytest.fixture
async def client(start: Start) -> TestClient[Any, Any]:
    """A client of the ordinary single-user server."""
    opened: TestClient[Any, Any] = await start()
    return opened
