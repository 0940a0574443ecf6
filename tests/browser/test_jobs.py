"""The job list: what runs, what waits, what failed, and what can be had back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.editor import LOADER, SAMPLER, SAVE, Editor, Watch
from tests.support.server_process import REPOSITORY, ServerProcess
from tests.support.waiting import read_until

pytestmark = pytest.mark.browser

DEMO = "latentloom-demo.safetensors"
HOURS = 10_000  # steps that nobody waits for


def picture(colour: int, prefix: str = "flat") -> dict[str, Any]:
    """A prompt that needs no model: a flat picture, saved."""
    size = {"width": 64, "height": 64, "batch_size": 1, "color": colour}
    return {
        "1": {"class_type": "EmptyImage", "inputs": size},
        "2": {
            "class_type": "SaveImage",
            "inputs": {"images": ["1", 0], "filename_prefix": prefix},
        },
    }


@pytest.fixture
def broken_checkpoint(server: ServerProcess) -> Iterator[str]:
    """Name of a checkpoint whose download was cut off."""
    path = server.base / "output/checkpoints/cut-off.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    with (REPOSITORY / "models/checkpoints" / DEMO).open("rb") as whole:
        path.write_bytes(whole.read(5000))
    yield path.name
    path.unlink()


def cancel(row: Any) -> None:
    """Cancels a job with the button that its row shows under the pointer."""
    job_id = row.get_attribute("data-job-id")
    same_row = row.page.locator(f"[data-job-id='{job_id}']")  # rows change their text and place
    same_row.hover()
    same_row.get_by_role("button", name="Cancel").click()


def wait_sampling(editor: Editor, server: ServerProcess) -> None:
    """Waits until a job that lasts hours samples, and the page knows that it does.

    Runs that started by themselves may come before it, and leave their traces on the page.
    """

    def running() -> list[tuple[str, int]]:
        taken = server.get("/queue")["queue_running"]
        return [(item[1], item[2][str(SAMPLER)]["inputs"]["steps"]) for item in taken]

    assert read_until(lambda: [steps for _, steps in running()], [HOURS]) == [HOURS]
    ((prompt_id, _),) = running()
    editor.page.evaluate(
        """(id) => new Promise((resolve) => window.comfyAPI.api.api.addEventListener(
            "progress_state", ({ detail }) => { if (detail.prompt_id === id) resolve(); }))""",
        prompt_id,
    )


def test_running_and_waiting_jobs_are_cancelled_from_the_list(
    editor: Editor, server: ServerProcess
) -> None:
    editor.set(SAMPLER, steps=HOURS)
    for _ in range(4):
        editor.press_run()
    jobs = editor.open_jobs()
    waiting = jobs.locator("[data-job-id]").filter(has_text="In queue")
    running = jobs.locator("[data-job-id]").filter(has_text="Total:")
    editor.wait_picture(SAMPLER)  # a preview: it is sampling
    editor.page.get_by_text("1 running, 3 queued").wait_for()
    cancel(waiting.first)
    editor.page.get_by_text("1 running, 2 queued").wait_for()
    editor.page.get_by_role("button", name="Clear queued").click()
    waiting.first.wait_for(state="hidden")
    cancel(running)
    editor.page.get_by_text("0 active").wait_for()
    server.wait_idle()
    statuses = {job["status"] for job in server.get("/api/jobs")["jobs"]}
    assert statuses == {"cancelled"}

    editor.set(SAMPLER, steps=2)  # the server goes on
    editor.press_run()
    editor.wait_picture(SAVE)


def test_the_stop_button_ends_what_runs_and_the_next_job_starts(
    editor: Editor, server: ServerProcess
) -> None:
    editor.set(SAMPLER, steps=HOURS)
    editor.press_run()
    editor.wait_picture(SAMPLER)
    editor.set(SAMPLER, steps=2)
    editor.press_run()
    editor.page.get_by_text("2 active").wait_for()
    editor.page.get_by_role("button", name="Cancel current run").click()
    editor.wait_picture(SAVE)
    server.wait_idle()
    statuses = [job["status"] for job in server.get("/api/jobs?sort_order=asc")["jobs"]]
    assert statuses == ["cancelled", "completed"]


def test_an_error_is_shown_on_its_node_and_goes_away(
    editor: Editor, server: ServerProcess, watch: Watch, broken_checkpoint: str
) -> None:
    watch.allowed += ["400 POST /api/prompt", "console: PromptExecutionError"]
    overlay = editor.page.get_by_test_id("error-overlay")
    editor.set(SAMPLER, steps=2)
    for name, explanation in (
        ("never-there.safetensors", "never-there.safetensors for Load Checkpoint's ckpt_name"),
        (broken_checkpoint, "Load Checkpoint failed"),
    ):
        editor.set(LOADER, ckpt_name=name)
        editor.press_run()
        overlay.get_by_text(explanation).wait_for()
        editor.wait_outlined(LOADER)

    overlay.get_by_role("button", name="View details").click()
    details = editor.page.get_by_test_id("properties-panel")
    details.get_by_text("the last download was cut off").first.wait_for()

    editor.set(LOADER, ckpt_name=DEMO)
    editor.press_run()
    editor.wait_picture(SAVE)
    editor.wait_outlined()
    overlay.wait_for(state="hidden")


def test_a_finished_job_gives_its_graph_back(editor: Editor, server: ServerProcess) -> None:
    editor.load(picture(0xFF0000, "given-back"))
    editor.press_run()
    editor.wait_picture(2)
    editor.set(1, color=0x00FF00)
    row = editor.open_jobs().locator("[data-job-id]").filter(has_text="given-back_00001_.png")
    row.hover()
    row.get_by_role("button", name="More").click()
    editor.page.get_by_role("menuitem", name="Open as workflow in new tab").click()
    editor.wait("() => window.app.graph.getNodeById(1)?.widgets[3].value === 0xFF0000")
    editor.wait_types(["EmptyImage", "SaveImage"])

    editor.page.get_by_test_id("queue-overlay-toggle").click()
    row.wait_for(state="hidden")
    editor.open_panel("assets")
    asset = editor.page.get_by_alt_text("given-back_00001_").first
    editor.choose(asset, "Insert as node in workflow")
    editor.wait("() => window.app.graph.nodes.at(-1).imgs?.[0]?.naturalWidth === 64")
    assert editor.types() == ["EmptyImage", "SaveImage", "LoadImage"]
    editor.choose(asset, "Delete")
    editor.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    asset.wait_for(state="hidden")
    assert read_until(lambda: server.get("/api/jobs")["jobs"], []) == []


def test_two_tabs_share_the_queue_but_not_their_pictures(
    editor: Editor, second_editor: Editor
) -> None:
    one, two = editor, second_editor
    names = [tab.page.evaluate("() => window.comfyAPI.api.api.clientId") for tab in (one, two)]
    assert len(set(names)) == 2
    for tab, colour in ((one, 0xFF0000), (two, 0x0000FF)):
        tab.count_events("executed", "status")
        tab.load(picture(colour))
    for tab in (one, two):
        tab.press_run()
    for tab in (one, two):
        tab.wait_picture(2)
    assert one.colours(2, (0.5, 0.5)) == [[255, 0, 0]]
    assert two.colours(2, (0.5, 0.5)) == [[0, 0, 255]]
    for tab in (one, two):
        tab.wait("() => window.seen.filter((kind) => kind === 'status').length >= 6")
        assert tab.seen().count("executed") == 1
        jobs = tab.open_jobs()
        for name in ("flat_00001_.png", "flat_00002_.png"):
            jobs.get_by_text(name).wait_for()


def test_a_page_loaded_again_in_the_middle_of_a_run_goes_on_showing_it(editor: Editor) -> None:
    editor.set(SAMPLER, steps=HOURS)
    editor.press_run()
    editor.wait_picture(SAMPLER)
    editor.reload()
    editor.wait_picture(SAMPLER)
    running = editor.open_jobs().locator("[data-job-id]").filter(has_text="Running")
    cancel(running)
    running.wait_for(state="hidden")


def test_batches_instant_runs_the_interrupt_key_and_clearing_the_history(
    editor: Editor, server: ServerProcess
) -> None:
    page = editor.page

    def jobs() -> list[str]:
        return [job["status"] for job in server.get("/api/jobs?sort_order=asc")["jobs"]]

    def choose(mode: str) -> None:
        page.get_by_test_id("queue-mode-menu-trigger").click()
        page.get_by_text(mode, exact=True).last.click()

    editor.set(SAMPLER, steps=1)
    editor.count_events("execution_success")
    count = page.locator(".batch-count input")
    count.fill("3")
    count.press("Enter")
    editor.press_run()
    editor.wait("() => window.seen.length === 3")
    server.wait_idle()
    assert jobs() == ["completed"] * 3
    count.fill("1")
    count.press("Enter")

    choose("Run (Instant)")
    editor.press_run()
    editor.wait("() => window.seen.length >= 6")
    choose("Run")
    page.get_by_text("0 active").wait_for()

    editor.set(SAMPLER, steps=HOURS)
    editor.press_run()
    wait_sampling(editor, server)
    page.keyboard.press("Control+Alt+Enter")
    page.get_by_text("0 active").wait_for()
    server.wait_idle()
    assert jobs()[-1] == "cancelled"

    editor.open_jobs()
    page.get_by_role("button", name="More options").click()
    page.get_by_text("Clear job history").last.click()
    page.get_by_role("dialog").get_by_role("button", name="Clear").click()
    page.locator("[data-job-id]").first.wait_for(state="hidden")
    assert read_until(jobs, []) == []
