"""The panels that look something up: models, help, log, nodes."""

from __future__ import annotations

import pytest

from tests.browser.editor import SAMPLER, SAVE, Editor
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.browser


def test_models_nodes_help_and_log_are_shown(editor: Editor, server: ServerProcess) -> None:
    page = editor.page
    editor.open_panel("model-library")
    page.get_by_role("treeitem", name="checkpoints").click()
    name = "latentloom-demo.safetensors"
    title = server.get(f"/view_metadata/checkpoints?filename={name}")["modelspec.title"]
    page.get_by_role("treeitem", name=title).hover()
    page.get_by_text("Architecture:").wait_for()
    page.locator(
        "[src*='/preview/checkpoints/'], [style*='/preview/checkpoints/']"
    ).first.wait_for()

    editor.open_panel("node-library")
    page.get_by_placeholder("Search Nodes").fill("KSampler")
    page.get_by_text("KSampler (Advanced)").wait_for()
    page.keyboard.press("Escape")

    editor.click_node(SAMPLER)
    editor.press_on_selection("Node Info")
    help_text = page.get_by_test_id("properties-panel")
    help_text.get_by_role("heading", name="Inputs").wait_for()

    page.get_by_role("button", name="Toggle Bottom Panel").click()
    log = page.get_by_test_id("terminal-host")
    editor.set(SAMPLER, steps=2)
    editor.press_run()
    log.get_by_text("POST /api/prompt").first.wait_for()


def test_the_second_node_design_runs_and_shows_the_picture(editor: Editor) -> None:
    page = editor.page
    page.evaluate("() => window.app.extensionManager.setting.set('Comfy.VueNodes.Enabled', true)")
    node = page.locator(f"[data-node-id='{SAVE}']")
    node.wait_for()
    editor.set(SAMPLER, steps=2)
    editor.press_run()
    node.get_by_role("img").first.wait_for()
    page.locator(f"[data-node-id='{SAMPLER}']").get_by_role("img").first.wait_for()
