"""A stranger opens the page, presses Run and gets a picture; later all is as it was left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.editor import SAMPLER, SAVE, Editor, Watch
from tests.support.server_process import ServerProcess, running_server, start_server
from tests.support.waiting import read_until

pytestmark = pytest.mark.browser


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory, chromium_path: str) -> Iterator[ServerProcess]:
    """A server that nobody has visited yet, and that a test may stop."""
    with running_server(tmp_path_factory.mktemp("first"), "--cpu") as running:
        yield running


def is_red(colour: list[int]) -> bool:
    red, green, blue = colour
    return red > 120 and red > 2 * max(green, blue)


def is_blue(colour: list[int]) -> bool:
    red, green, blue = colour
    return blue > 100 and blue > 1.5 * max(red, green)


def test_run_works_at_once_and_all_is_kept_over_a_restart(
    editor: Editor, server: ServerProcess, watch: Watch
) -> None:
    assert {"CheckpointLoaderSimple", "KSampler", "SaveImage"} <= set(editor.types())
    assert editor.page.get_by_role("dialog").count() == 0
    editor.count_events("b_preview_with_metadata", "execution_success", "reconnected")
    editor.press_run()
    editor.wait("() => window.seen.includes('execution_success')")

    assert editor.seen().count("b_preview_with_metadata") >= 2
    assert editor.seen()[-1] == "execution_success"
    assert editor.wait_picture(SAMPLER) > 0  # the last preview stays on the node
    assert editor.wait_picture(SAVE) == 128
    middle, corner = editor.colours(SAVE, (0.5, 0.5), (0.03, 0.03))
    assert is_red(middle), middle
    assert is_blue(corner), corner
    assert [job["status"] for job in server.get("/api/jobs")["jobs"]] == ["completed"]

    change_a_setting(editor)
    assert read_until(lambda: server.get("/settings").get("Comfy.DevMode"), True)
    editor.set(SAMPLER, steps=7)
    with watch.server_down():
        server.stop()
        editor.page.get_by_text("Reconnecting").first.wait_for()
        again = start_server(server.base, "--cpu", port=server.port)
        server.process = again.process  # the fixture stops what runs now
        editor.wait("() => window.seen.includes('reconnected')")
    editor.page.get_by_text("Reconnecting").first.wait_for(state="hidden")
    editor.count_events("execution_success")
    editor.press_run()
    editor.wait("() => window.seen.includes('execution_success')")
    history = server.get("/api/jobs?sort_order=asc")["jobs"]
    assert [job["preview_output"]["filename"] for job in history] == [
        "latentloom_00001_.png",
        "latentloom_00002_.png",
    ]

    editor.reload()
    assert editor.value(SAMPLER, "steps") == 7
    assert editor.page.evaluate("() => window.app.extensionManager.setting.get('Comfy.DevMode')")


def change_a_setting(editor: Editor) -> None:
    """Turns the developer's mode on, in the settings dialog."""
    page = editor.page
    page.keyboard.press("Control+,")
    dialog = page.get_by_test_id("settings-dialog")
    dialog.get_by_label("Enable dev mode options").click()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
