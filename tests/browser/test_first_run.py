"""A stranger opens the page, presses Run and gets a picture."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import Watch
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.browser

SAVE_NODE = 7
PICTURE_SIZE = f"() => window.app.graph.getNodeById({SAVE_NODE}).imgs?.[0]?.naturalWidth"


def test_run_works_at_once_and_shows_the_picture(
    page: Any, server: ServerProcess, watch: Watch
) -> None:
    types = page.evaluate("() => window.app.graph.nodes.map((node) => node.type)")
    assert {"CheckpointLoaderSimple", "KSampler", "SaveImage"} <= set(types)
    frames: list[Any] = []
    page.on("websocket", lambda socket: None)
    page.evaluate(
        """() => {
            window.seen = [];
            const { api } = window.comfyAPI.api;
            for (const kind of ["b_preview_with_metadata", "b_preview", "execution_success"])
                api.addEventListener(kind, () => window.seen.push(kind));
        }"""
    )
    page.get_by_role("button", name="Run", exact=True).first.click()
    page.wait_for_function(PICTURE_SIZE, timeout=60_000)
    assert page.evaluate(PICTURE_SIZE) == 128
    page.wait_for_function("() => window.seen.includes('execution_success')")
    frames = page.evaluate("() => window.seen")
    assert any(kind.startswith("b_preview") for kind in frames)
    jobs = server.get("/api/jobs?status=completed")["jobs"]
    assert [job["status"] for job in jobs] == ["completed"]
    assert watch.requests == []
    assert watch.console == []


def test_a_second_visit_brings_the_settings_and_workflow_back(page: Any, watch: Watch) -> None:
    page.evaluate("() => window.app.extensionManager.setting.set('Comfy.ColorPalette', 'light')")
    page.evaluate("() => { window.app.graph.getNodeById(5).widgets[2].value = 13 }")
    page.evaluate("() => window.app.extensionManager.workflow.activeWorkflow.changeTracker"
                  ".captureCanvasState?.()")
    page.reload()
    page.wait_for_function("() => window.app?.graph?.nodes?.length > 0", timeout=60_000)
    palette = "() => window.app.extensionManager.setting.get('Comfy.ColorPalette')"
    assert page.evaluate(palette) == "light"
    assert watch.console == []
