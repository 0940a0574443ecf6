"""The panels that look something up: models, help, log, nodes."""

from __future__ import annotations

import pytest

from tests.browser.editor import SAMPLER, SAVE, Editor
from tests.support.server_process import ServerProcess
from tests.support.waiting import read_until

pytestmark = pytest.mark.browser

# Gives every setting that is a number, a choice or a switch another value; returns the new ones.
_CHANGE_ALL = """async () => {
    const { setting } = window.app.extensionManager, changed = {};
    const other = ({ id, type, options, attrs }, now) => {
        if (type === "boolean") return !now;
        if (type === "slider" || type === "number") {
            const next = now + (attrs?.step ?? 1);
            return next > (attrs?.max ?? Infinity) ? attrs.min ?? 0 : next;
        }
        const choices = typeof options === "function" ? options(now) : options ?? [];
        return choices.map((choice) => choice.value ?? choice).find((value) => value !== now);
    };
    const kinds = ["boolean", "slider", "number", "combo"];
    const moves_the_page = /Locale|UseNewMenu|VueNodes|ColorPalette/;
    for (const found of Object.values(window.app.ui.settings.settingsLookup)) {
        if (!kinds.includes(found.type) || moves_the_page.test(found.id)) continue;
        const value = other(found, setting.get(found.id));
        if (value !== undefined && value === value) changed[found.id] = value;
    }
    await Promise.all(Object.entries(changed).map(([id, value]) => setting.set(id, value)));
    return changed;
}"""
_READ_ALL = """(names) => Object.fromEntries(
    names.map((name) => [name, window.app.extensionManager.setting.get(name)]))"""


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
    editor.setting("Comfy.VueNodes.Enabled", True)
    node = page.locator(f"[data-node-id='{SAVE}']")
    node.wait_for()
    editor.set(SAMPLER, steps=2)
    editor.press_run()
    node.get_by_role("img").first.wait_for()
    page.locator(f"[data-node-id='{SAMPLER}']").get_by_role("img").first.wait_for()


def test_every_template_in_view_has_a_picture(editor: Editor) -> None:
    page = editor.page
    page.get_by_test_id("side-toolbar").get_by_role("button", name="Templates").click()
    dialog = page.get_by_role("dialog")
    for group in ("All Templates", "Video"):
        dialog.get_by_text(group, exact=True).first.click()
        editor.wait("""() => {
            const shown = [...document.querySelectorAll("[role=dialog] img")].filter((picture) =>
                picture.getBoundingClientRect().top < innerHeight);
            return shown.length > 3 && shown.every((picture) => picture.naturalWidth > 0);
        }""")


def test_every_listed_template_has_all_its_nodes(server: ServerProcess) -> None:
    known = set(server.get("/object_info")) | {"MarkdownNote", "Note", "PrimitiveNode", "Reroute"}
    rows = [row for group in server.get("/templates/index.json") for row in group["templates"]]
    assert len(rows) > 50
    for row in rows:
        workflow = server.get(f"/templates/{row['name']}.json")
        graphs = [workflow, *workflow.get("definitions", {}).get("subgraphs", [])]
        own = {graph["id"] for graph in graphs[1:]}
        used = {node["type"] for graph in graphs for node in graph["nodes"]}
        assert used - own <= known, row["name"]


def test_every_page_of_the_settings_help_and_keys_open(editor: Editor) -> None:
    page = editor.page
    page.keyboard.press("Control+,")
    dialog = page.get_by_test_id("settings-dialog")
    for name, text in (
        ("User", "My Account Settings"),
        ("Lite Graph", "Canvas Navigation"),
        ("Appearance", "Color Palette"),
        ("Mask Editor", "Brush Adjustment"),
        ("Keybinding", "Save Workflow"),
        ("Extension", "latentloom.demo"),
        ("About", "0.8.0"),
    ):
        dialog.get_by_text(name, exact=True).first.click()
        if name == "Extension":
            dialog.get_by_placeholder("Search Extensions").fill("latentloom")
        dialog.get_by_text(text).first.wait_for()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")

    bar = page.get_by_test_id("side-toolbar")
    bar.get_by_role("button", name="Keyboard Shortcuts").click()
    page.get_by_text("View Controls").wait_for()
    bar.get_by_role("button", name="Help Center").click()
    page.get_by_text("What's New?").wait_for()


def test_previews_follow_the_setting_and_a_narrow_window_shows_them(
    editor: Editor, server: ServerProcess
) -> None:
    events = ("b_preview_with_metadata", "execution_success")
    editor.set(SAMPLER, steps=4)
    for method, expected in (("none", 0), ("latent2rgb", 1)):
        editor.count_events(*events)
        editor.setting("Comfy.Execution.PreviewMethod", method)
        editor.press_run()
        editor.wait("() => window.seen.includes('execution_success')")
        assert min(1, editor.seen().count(events[0])) == expected

    size = editor.page.viewport_size
    editor.page.set_viewport_size({"width": 390, "height": 844})
    editor.press_run()
    editor.open_panel("assets")
    editor.page.locator("img[alt^='latentloom_']").first.wait_for()
    editor.page.set_viewport_size(size)


def test_every_setting_is_kept(editor: Editor, server: ServerProcess) -> None:
    changed = editor.page.evaluate(_CHANGE_ALL)
    assert len(changed) > 80

    def stored() -> dict[str, object]:
        settings = server.get("/settings")
        return {name: settings.get(name) for name in changed}

    assert read_until(stored, changed) == changed
    editor.reload()
    assert editor.page.evaluate(_READ_ALL, list(changed)) == changed
