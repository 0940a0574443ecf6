"""The unmodified editor in headless Chromium, watched for errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.server_process import ServerProcess, running_server

CHROMIUM_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Calls to other hosts and optional files; http-ws-api section 12 explains them.
EXPECTED_404 = ("/user.css", "/api/userdata/user.css", "/api/userdata/comfy.templates.json")


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """Path of Chromium; tests that need it are skipped where it is not installed."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("Chromium is not installed")
    return found


@pytest.fixture(scope="session")
def browser(chromium_path: str) -> Iterator[Any]:
    """One browser for the session."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=chromium_path, args=list(CHROMIUM_FLAGS)
        )
        yield launched
        launched.close()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server nobody has visited yet."""
    with running_server(tmp_path_factory.mktemp("browser"), "--cpu") as running:
        yield running


@dataclass
class Watch:
    """What went wrong on a page."""

    origin: str
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def attach(self, page: Any) -> None:
        """Listens to a page from now on."""
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.console.append(f"uncaught: {error}"))
        page.on("response", self._on_response)

    def _on_console(self, message: Any) -> None:
        if message.type != "error":
            return
        source = (message.location or {}).get("url", "")
        own = source.startswith(self.origin)
        if "Failed to load resource" in message.text:
            return  # counted as a failed request, where the status and address are known
        if own or not source:
            self.console.append(f"{message.text} ({source})")

    def _on_response(self, response: Any) -> None:
        if not response.url.startswith(self.origin) or response.status < 400:
            return
        path = response.url[len(self.origin) :].split("?")[0]
        is_absent_folder = response.status == 404 and path == "/api/userdata"
        if not (is_absent_folder or (response.status == 404 and path in EXPECTED_404)):
            self.requests.append(f"{response.status} {path}")


@pytest.fixture
def watch(server: ServerProcess) -> Watch:
    """The errors of the pages of this test."""
    return Watch(server.url)


@pytest.fixture
def page(browser: Any, server: ServerProcess, watch: Watch) -> Iterator[Any]:
    """The editor, loaded by somebody who has never been here."""
    context = browser.new_context(viewport={"width": 1600, "height": 900})
    opened = context.new_page()
    watch.attach(opened)
    opened.goto(server.url)
    opened.wait_for_function("() => window.app?.graph?.nodes?.length > 0", timeout=60_000)
    yield opened
    context.close()
