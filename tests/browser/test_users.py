"""Several people at one server: chosen by name, or logged in; and what a pack adds to the page."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.editor import PATIENCE_MS, SAMPLER, SAVE, Editor, Watch
from tests.support.server_process import REPOSITORY, ServerProcess, running_server
from tests.support.waiting import read_until

pytestmark = pytest.mark.browser

PACK = """
from aiohttp import web
from server import PromptServer

WEB_DIRECTORY = "js"


class Sayer:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"text": ("STRING", {"default": "hello"})}}

    RETURN_TYPES = ()
    FUNCTION = "say"
    OUTPUT_NODE = True

    def say(self, text):
        PromptServer.instance.send_sync("pack.said", {"text": text})
        return {"ui": {"text": [text]}}


NODE_CLASS_MAPPINGS = {"PackSayer": Sayer}


@PromptServer.instance.routes.post("/pack/echo")
async def echo(request):
    return web.json_response(await request.json())
"""
SCRIPT = """
import { app } from "/scripts/app.js";
import { api } from "/scripts/api.js";
app.registerExtension({
    name: "pack.extension",
    commands: [{ id: "pack.command", label: "Pack", function() { window.packCommand = true; } }],
    keybindings: [{ combo: { key: "j", ctrl: true }, commandId: "pack.command" }],
    async setup() {
        api.addEventListener("pack.said", (event) => { window.packSaid = event.detail.text; });
        const body = JSON.stringify([1]);
        window.packEcho = await (await api.fetchApi("/pack/echo", { method: "POST", body })).json();
    },
});
"""


@pytest.fixture
def fresh_page(browser: Any) -> Iterator[Any]:
    """A page that shares nothing with those of other tests."""
    context = browser.new_context(viewport={"width": 1600, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    yield context.new_page()
    context.close()


@pytest.fixture
def watch(server: ServerProcess) -> Iterator[Watch]:
    """As everywhere; the style sheet of a user who is not known yet is refused, not missing."""
    watching = Watch(server.url, allowed=["401 GET /api/userdata/user.css", "Refused to apply"])
    yield watching
    assert watching.unexpected() == []


class TestByName:
    """`--multi-user`."""

    @pytest.fixture
    def server(self, chromium_path: str, tmp_path: Path) -> Iterator[ServerProcess]:
        """A server for several users, with a pack."""
        scripts = tmp_path / "custom_nodes/sayer/js"
        scripts.mkdir(parents=True)
        (scripts.parent / "__init__.py").write_text(PACK)
        (scripts / "sayer.js").write_text(SCRIPT)
        with running_server(tmp_path, "--cpu", "--multi-user") as running:
            yield running

    def test_a_new_user_runs_and_saves_and_packs_work(
        self, server: ServerProcess, watch: Watch, fresh_page: Any
    ) -> None:
        with watch.over(fresh_page):
            fresh_page.goto(server.url)
            fresh_page.get_by_role("textbox").first.fill("Ann")
            fresh_page.get_by_role("button", name="Next").click()
            editor = Editor(fresh_page, watch)
            editor.wait_ready()
            editor.wait("() => JSON.stringify(window.packEcho) === '[1]'")
            editor.set(SAMPLER, steps=1)
            editor.press_run()
            editor.wait_picture(SAVE)
            editor.save_as("of ann")
            ((user, name),) = server.get("/users")["users"].items()
            assert name == "Ann"
            kept = server.base / "user" / user / "workflows/of ann.json"
            assert read_until(kept.is_file, True)

            fresh_page.mouse.click(900, 820)
            fresh_page.keyboard.press("Control+j")
            editor.wait("() => window.packCommand")
            editor.load({"1": {"class_type": "PackSayer", "inputs": {"text": "good morning"}}})
            editor.press_run()
            editor.wait("() => window.packSaid === 'good morning'")


class TestByLogin:
    """`--auth`."""

    @pytest.fixture
    def token(self, tmp_path: Path) -> str:
        """The token of the user ann."""
        command = [sys.executable, str(REPOSITORY / "main.py"), "--base-directory", str(tmp_path)]
        made = subprocess.run(
            [*command, "--add-user", "ann:user"], capture_output=True, text=True, check=True
        )
        found = re.search(r"\S{32,}", made.stdout)
        assert found is not None, made
        return found[0]

    @pytest.fixture
    def server(self, chromium_path: str, tmp_path: Path, token: str) -> Iterator[ServerProcess]:
        """A server on which people log in."""
        with running_server(tmp_path, "--cpu", "--auth") as running:
            yield running

    def test_the_login_page_leads_to_the_editor(
        self, server: ServerProcess, watch: Watch, token: str, fresh_page: Any
    ) -> None:
        watch.allowed.append("401 POST /login")
        with watch.over(fresh_page):
            fresh_page.goto(server.url)
            for attempt in ("wrong", token):
                fresh_page.get_by_label("Name").fill("ann")
                fresh_page.get_by_label("Token").fill(attempt)
                fresh_page.get_by_role("button").click()
                if attempt == "wrong":
                    fresh_page.get_by_role("alert").get_by_text("do not belong").wait_for()
            editor = Editor(fresh_page, watch)
            editor.wait_ready()
            editor.set(SAMPLER, steps=1)
            editor.press_run()
            editor.wait_picture(SAVE)
            editor.open_panel("assets")
            fresh_page.get_by_alt_text("latentloom_00001_").first.wait_for()
            assert (server.base / "output/ann/latentloom_00001_.png").is_file()
