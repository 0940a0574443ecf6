"""The node manager is loaded when asked for, and costs nobody the server when it fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from comfy import cli_args
from utils.node_manager import PACKAGE, find_manager

MANAGER = """
from aiohttp import web
steps = []
def prestartup():
    steps.append("prestartup")
def start():
    steps.append("start")
def should_be_disabled(fullpath):
    return fullpath.endswith("old-manager")
def create_middleware():
    @web.middleware
    async def gate(request, handler):
        if request.path == "/banned":
            return web.Response(status=403)
        return await handler(request)
    return gate
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the package is looked for first."""
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop(PACKAGE, None)
    yield tmp_path
    sys.modules.pop(PACKAGE, None)


def arguments(*flags: str) -> object:
    return cli_args._completed(cli_args.build_parser().parse_args(list(flags)))


@pytest.mark.parametrize("flag", ["--enable-manager", "--enable-manager-legacy-ui"])
async def test_the_manager_goes_through_its_steps(folder: Path, flag: str) -> None:
    (folder / f"{PACKAGE}.py").write_text(MANAGER)
    manager = find_manager(arguments(flag))
    app = web.Application()

    async def answer(request: web.Request) -> web.Response:
        return web.Response()

    app.router.add_get("/{path}", answer)
    manager.prepare()
    manager.start(app)
    assert sys.modules[PACKAGE].steps == ["prestartup", "start"]
    assert manager.refuses("custom_nodes/old-manager")
    assert not manager.refuses("custom_nodes/other")
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/banned")).status == 403
        assert (await client.get("/other")).status == 200


def test_without_its_page_it_only_prepares(folder: Path) -> None:
    (folder / f"{PACKAGE}.py").write_text(MANAGER)
    manager = find_manager(arguments("--enable-manager", "--disable-manager-ui"))
    app = web.Application()
    manager.prepare()
    manager.start(app)
    assert sys.modules[PACKAGE].steps == ["prestartup"]
    assert len(app.middlewares) == 0


@pytest.mark.parametrize("flags", [(), ("--enable-manager",)])
def test_a_manager_that_is_not_there_does_nothing(
    flags: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    manager = find_manager(arguments(*flags))
    app = web.Application()
    manager.prepare()
    manager.start(app)
    assert not manager.refuses("custom_nodes/old-manager")
    assert ("pip install comfyui-manager" in caplog.text) == bool(flags)


@pytest.mark.parametrize("broken", ["import surely_not_installed", "prestartup", "start"])
def test_a_manager_that_fails_is_left_out(
    folder: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"{broken}\n" if " " in broken else f"{MANAGER}\ndef {broken}():\n    raise ValueError\n"
    (folder / f"{PACKAGE}.py").write_text(text)
    manager = find_manager(arguments("--enable-manager"))
    app = web.Application()
    manager.prepare()
    manager.start(app)
    assert manager.package is None
    assert len(app.middlewares) == 0
    assert "manager" in caplog.text
