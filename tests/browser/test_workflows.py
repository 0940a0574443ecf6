"""Workflows that are kept: saved, found again, taken from a template, packed into a subgraph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.browser.editor import SAMPLER, SAVE, Editor
from tests.support.server_process import ServerProcess
from tests.support.waiting import read_until

pytestmark = pytest.mark.browser


def test_a_workflow_is_saved_found_bookmarked_renamed_and_deleted(
    editor: Editor, server: ServerProcess
) -> None:
    page = editor.page
    editor.set(SAMPLER, seed=77)
    editor.save_as("evening sky")
    folder = server.base / "user/default/workflows"
    assert read_until((folder / "evening sky.json").is_file, True)

    page.get_by_role("button", name="Create a new blank workflow").click()
    editor.wait("() => window.app.graph.nodes.length === 0")
    editor.open_panel("workflows")
    panel = page.get_by_test_id("workflows-sidebar")
    saved = panel.get_by_role("treeitem", name="evening sky")
    page.get_by_test_id("workflow-tab").filter(has_text="evening sky").hover()
    page.get_by_test_id("workflow-tab").filter(has_text="evening sky").get_by_test_id(
        "close-workflow-button"
    ).click()
    saved.click()
    editor.wait("(id) => window.app.graph.getNodeById(id)?.widgets[0].value === 77", SAMPLER)

    saved.hover()
    saved.get_by_role("button", name="Bookmark").click()
    panel.get_by_text("Bookmarks").wait_for()
    index = folder / ".index.json"
    assert read_until(
        lambda: index.is_file() and '"workflows/evening sky.json"' in index.read_text(), True
    )
    editor.choose(panel.get_by_role("treeitem", name="evening sky").last, "Rename")
    page.keyboard.press("Control+a")
    page.keyboard.type("morning sky")
    page.keyboard.press("Enter")
    renamed = panel.get_by_role("treeitem", name="morning sky").last
    renamed.wait_for()
    names = ["morning sky.json"]
    assert read_until(lambda: [path.name for path in folder.glob("[!.]*.json")], names) == names

    editor.choose(renamed, "Delete")
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    panel.get_by_text("No workflows found").wait_for()


def test_an_app_is_built_from_a_graph_saved_and_run(editor: Editor, server: ServerProcess) -> None:
    page = editor.page
    editor.set(SAMPLER, steps=1)
    editor.command("Comfy.ToggleLinear")
    page.get_by_role("button", name="Build an app").click()

    def choose(node_id: int, text: str) -> None:
        place = page.locator(f"[data-node-id='{node_id}']").get_by_text(text, exact=True).first
        place.click(force=True)  # a pane lies over it and takes the click

    choose(2, "text")
    page.get_by_role("button", name="Next").click()
    choose(SAVE, "images")
    page.get_by_role("button", name="Next").click()
    page.get_by_role("button", name="Save as").click()
    page.get_by_role("dialog").get_by_role("textbox").fill("painter")
    page.get_by_role("dialog").get_by_role("button", name="Save").last.click()
    page.get_by_role("button", name="View app").last.click()
    assert read_until((server.base / "user/default/workflows/painter.app.json").is_file, True)
    skip = page.get_by_role("button", name="Skip")
    skip.click()
    skip.wait_for(state="hidden")
    page.get_by_role("button", name="Run", exact=True).last.click()
    page.get_by_text("latentloom_0").first.wait_for()
    server.wait_idle()
    (job,) = server.get("/api/jobs")["jobs"]
    assert job["status"] == "completed"


def test_a_template_opens_and_names_the_models_it_lacks(editor: Editor) -> None:
    page = editor.page
    page.get_by_test_id("side-toolbar").get_by_role("button", name="Templates").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_placeholder("Search").fill("SDXL Simple")
    dialog.get_by_test_id("template-workflow-sdxl_simple_example").click()
    editor.wait("() => window.app.graph.nodes.some((node) => node.type === 'KSamplerAdvanced')")
    dialog.wait_for(state="hidden")
    assert editor.types().count("CheckpointLoaderSimple") == 2
    page.get_by_text("issues found").wait_for()


def test_nodes_packed_into_a_subgraph_run_are_published_and_taken_out_again(
    editor: Editor, server: ServerProcess
) -> None:
    page = editor.page
    editor.set(SAMPLER, steps=2)
    editor.click_node(SAMPLER)
    page.keyboard.down("Control")
    editor.click_node(6)
    page.keyboard.up("Control")
    editor.press_on_selection("Convert Selection to Subgraph")
    editor.wait("() => !window.app.graph.nodes.some((node) => node.type === 'VAEDecode')")
    editor.press_run()
    assert editor.wait_picture(SAVE) == 128
    server.wait_idle()
    prompt = server.get("/api/jobs")["jobs"][0]["id"]
    ran = server.get(f"/history/{prompt}")[prompt]["prompt"][2]
    inside = {node["class_type"] for node_id, node in ran.items() if ":" in node_id}
    assert inside == {"KSampler", "VAEDecode"}

    editor.press_on_selection("Publish Subgraph")
    page.get_by_role("dialog").get_by_role("textbox").fill("painter")
    page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
    page.get_by_role("dialog").wait_for(state="hidden")
    assert read_until((server.base / "user/default/subgraphs/painter.json").is_file, True)
    editor.open_panel("node-library")
    for folder in ("My Blueprints", "User"):
        page.get_by_role("treeitem", name=folder).click()
    blueprint = page.get_by_role("treeitem", name="painter")
    blueprint.wait_for()

    editor.command("Comfy.NewBlankWorkflow")
    editor.wait("() => window.app.graph.nodes.length === 0")
    blueprint.click()
    page.mouse.click(900, 500)
    editor.wait("() => window.app.graph.nodes[0]?.subgraph")
    page.evaluate("""() => {
        const [node] = window.app.graph.nodes;
        window.app.canvas.openSubgraph(node.subgraph, node);
    }""")
    breadcrumb = page.get_by_test_id("subgraph-breadcrumb")
    breadcrumb.get_by_text("painter").wait_for()
    inside = "() => window.app.canvas.graph.nodes.map((node) => node.type).sort()"
    assert page.evaluate(inside) == ["KSampler", "VAEDecode"]
    page.get_by_test_id("subgraph-breadcrumb-back").click()
    editor.wait("() => window.app.canvas.graph.nodes[0].subgraph")


def test_a_workflow_is_exported_opened_from_a_file_and_saved_over_another(
    editor: Editor, server: ServerProcess, tmp_path: Path
) -> None:
    page = editor.page
    types = editor.types()
    editor.save_as("one")
    for command, name in (
        ("Comfy.ExportWorkflow", "graph"),
        ("Comfy.ExportWorkflowAPI", "prompt"),
    ):
        with page.expect_download() as download:
            editor.command(command)
            editor.answer(name)
        download.value.save_as(tmp_path / f"{name}.json")
    prompt = json.loads((tmp_path / "prompt.json").read_text())
    assert prompt[str(SAMPLER)]["class_type"] == "KSampler"
    for name in ("prompt", "graph"):
        with page.expect_file_chooser() as chooser:
            editor.command("Comfy.OpenWorkflow")
        chooser.value.set_files(tmp_path / f"{name}.json")
        page.get_by_test_id("workflow-tab").filter(has_text=name).wait_for()
    editor.wait_types(types)

    editor.command("Comfy.SaveWorkflowAs")
    page.get_by_role("dialog").get_by_role("textbox").fill("one")
    page.get_by_role("dialog").get_by_role("button", name="Confirm").click()
    page.get_by_role("button", name="Overwrite").click()
    page.get_by_role("dialog").wait_for(state="hidden")
    editor.command("Comfy.SaveWorkflowAs")
    editor.answer("folder/two")
    folder = server.base / "user/default/workflows"
    editor.page.get_by_test_id("workflow-tab").filter(has_text="two").wait_for()
    assert read_until((folder / "folder/two.json").is_file, True)
    assert json.loads((folder / "one.json").read_text())["nodes"]


def test_nodes_and_models_that_are_missing_are_named(editor: Editor) -> None:
    source = {"name": "big.safetensors", "url": "https://example.invalid/", "directory": "loras"}
    place = {"pos": [100, 200], "size": [300, 100], "inputs": [], "outputs": []}
    unknown = {"id": 1, "type": "NobodyKnowsThis", "widgets_values": ["x"], **place}
    lora = {
        "id": 2,
        "type": "LoraLoaderModelOnly",
        "widgets_values": ["big.safetensors", 1.0],
        **place,
        "properties": {"models": [source]},
    }
    graph = {"nodes": [unknown, lora], "links": [], "version": 0.4}
    editor.page.evaluate(
        "(graph) => window.app.loadGraphData(graph)",
        {**graph, "last_node_id": 2, "last_link_id": 0},
    )
    editor.page.get_by_role("button", name="View details").click()
    panel = editor.page.get_by_test_id("properties-panel")
    panel.get_by_text("Missing Node Packs").wait_for()
    panel.get_by_text("big.safetensors").first.wait_for()
