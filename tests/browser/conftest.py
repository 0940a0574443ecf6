"""The unmodified editor in headless Chromium, watched for errors.

Fixtures that hold the browser end with this package: while Playwright is open it occupies the
thread's event loop, and asynchronous tests of other packages could not run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.editor import PATIENCE_MS, Editor, Watch
from tests.support.server_process import NOTHING, ServerProcess, running_server
from tests.support.waiting import read_until

CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# A page opened with this query starts without anything that earlier pages have stored.
FORGET = """if (location.search === "?forget") {
    localStorage.clear();
    sessionStorage.clear();
    window.name = "";
    history.replaceState(null, "", location.pathname);
}"""


@pytest.fixture(scope="package")
def chromium_path() -> str:
    """Path of Chromium; tests that need it are skipped where it is not installed."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("Chromium is not installed")
    return found


@pytest.fixture(scope="package")
def browser(chromium_path: str) -> Iterator[Any]:
    """One browser for all tests."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=chromium_path, args=list(CHROMIUM_FLAGS)
        )
        yield launched
        launched.close()


@pytest.fixture(scope="package")
def shared_server(
    chromium_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One server for all tests that leave it running."""
    with running_server(tmp_path_factory.mktemp("browser"), "--cpu") as running:
        yield running


@pytest.fixture
def server(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    """The shared server with nothing to do and no settings, as on a first visit."""
    settings = shared_server.base / "user/default/comfy.settings.json"
    settings.unlink(missing_ok=True)
    yield shared_server

    def stopped() -> Any:
        shared_server.post("/queue", {"clear": True})
        shared_server.post("/interrupt", {})
        return shared_server.get("/queue")

    assert read_until(stopped, NOTHING) == NOTHING
    shared_server.post("/history", {"clear": True})


@pytest.fixture
def watch(server: ServerProcess) -> Iterator[Watch]:
    """The errors of all pages of this test; there must be none at its end."""
    watching = Watch(server.url)
    yield watching
    assert watching.unexpected() == []


@pytest.fixture(scope="package")
def tab(browser: Any) -> Iterator[Any]:
    """One tab for all tests: a second page load costs half of a first one."""
    context = browser.new_context(viewport={"width": 1600, "height": 900})
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(FORGET)
    yield context.new_page()
    context.close()


@pytest.fixture
def editor(tab: Any, server: ServerProcess, watch: Watch) -> Iterator[Editor]:
    """The editor as a new visitor finds it."""
    with watch.over(tab):
        opened = Editor(tab, watch)
        opened.open(f"{server.url}/?forget")
        yield opened
        tab.goto("about:blank")


@pytest.fixture
def second_editor(
    tab: Any, server: ServerProcess, watch: Watch, editor: Editor
) -> Iterator[Editor]:
    """The editor in a second tab of the same browser."""
    page = tab.context.new_page()
    with watch.over(page):
        opened = Editor(page, watch)
        opened.open(server.url)
        yield opened
        page.close()
