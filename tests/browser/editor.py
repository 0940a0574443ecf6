"""What a person does in the editor, in the few words the tests need."""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import TimeoutError as PlaywrightTimeout

from tests.support.waiting import read_until

PATIENCE_MS = 60_000.0
LOADER, SAMPLER, SAVE = 1, 5, 7  # nodes of the demo workflow

_READY = """() => window.app?.extensionManager && window.app?.graph?.nodes?.length > 0
    && document.querySelector('[data-testid=side-toolbar]')"""
_POINT = """([id, widget]) => {
    const { graph, canvas } = window.app, node = graph.getNodeById(id);
    const row = widget && node.widgets.find((found) => found.name === widget);
    const [dx, dy] = row ? [node.size[0] / 2, row.last_y + 10] : [node.size[0] / 2, -15];
    const { left, top } = canvas.canvas.getBoundingClientRect(), { offset, scale } = canvas.ds;
    return [left + (node.pos[0] + dx + offset[0]) * scale,
            top + (node.pos[1] + dy + offset[1]) * scale];
}"""
_DROP = """([content, name, type]) => {
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([bytes], name, { type }));
    const place = { dataTransfer, bubbles: true, cancelable: true, clientX: 800, clientY: 700 };
    for (const kind of ["dragenter", "dragover", "drop"])
        document.getElementById("graph-canvas").dispatchEvent(new DragEvent(kind, place));
}"""
_PASTE = """([content, name, type]) => {
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
    const clipboardData = new DataTransfer();
    clipboardData.items.add(new File([bytes], name, { type }));
    document.dispatchEvent(
        new ClipboardEvent("paste", { clipboardData, bubbles: true, cancelable: true }));
}"""
_COLOURS = """([id, points]) => {
    const image = window.app.graph.getNodeById(id).imgs?.[0];
    if (!image?.naturalWidth) return null;
    const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    return points.map(([x, y]) => [...context.getImageData(
        x * canvas.width, y * canvas.height, 1, 1).data].slice(0, 3));
}"""
_OUTLINED = """() => window.app.graph.nodes.filter((node) =>
    node.has_errors || node.strokeStyles.executionError?.call(node)).map((node) => Number(node.id))
"""


@dataclass
class Watch:
    """What went wrong on the pages of a test, beyond what was to be expected.

    Attributes:
        origin: Address of the server; what other hosts answer does not count.
        allowed: Patterns of complaints that a test provokes on purpose.
    """

    origin: str
    complaints: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    is_server_down: bool = False

    # Files that need not exist, as the interface's description says where it names the route.
    OPTIONAL = re.compile(
        r"GET (/user\.css|/api/userdata/user\.css|/api/userdata/comfy\.templates\.json"
        r"|/api/userdata/workflows%2F\.index\.json"
        r"|/api/experiment/models/preview/.*|/api/view_metadata/.*)"
    )

    @contextlib.contextmanager
    def over(self, page: Any) -> Iterator[None]:
        """Listens to a page."""
        heard = {
            "console": self._on_console,
            "pageerror": self._on_exception,
            "response": self._on_response,
            "requestfailed": self._on_failure,
        }
        for event, listener in heard.items():
            page.on(event, listener)
        yield
        for event, listener in heard.items():
            page.remove_listener(event, listener)

    @contextlib.contextmanager
    def server_down(self) -> Iterator[None]:
        """Counts nothing: browsers report every attempt to reach a server that is not there."""
        self.is_server_down = True
        yield
        self.is_server_down = False

    def unexpected(self) -> list[str]:
        """The complaints that no pattern of `allowed` explains."""
        return [
            text
            for text in self.complaints
            if not any(re.search(pattern, text) for pattern in self.allowed)
        ]

    def _complain(self, text: str) -> None:
        if not self.is_server_down:
            self.complaints.append(text)

    def _on_console(self, message: Any) -> None:
        source = (message.location or {}).get("url", "")
        is_ours = not source or source.startswith(self.origin)
        # A failed request is counted where its status and address are known.
        is_repeated = message.text.startswith("Failed to load resource")
        if message.type == "error" and is_ours and not is_repeated:
            self._complain(f"console: {message.text} ({source})")

    def _on_exception(self, error: Any) -> None:
        self._complain(f"uncaught: {error}")

    def _on_response(self, response: Any) -> None:
        if not response.url.startswith(self.origin) or response.status < 400:
            return
        path, _, query = response.url[len(self.origin) :].partition("?")
        text = f"{response.request.method} {path}"
        if response.status != 404 or not self.OPTIONAL.fullmatch(text):
            self._complain(f"{response.status} {text}" + (query and f"?{query}"))

    def _on_failure(self, request: Any) -> None:
        is_given_up = "ERR_ABORTED" in (request.failure or "")
        if request.url.startswith(self.origin) and not is_given_up:
            self._complain(f"{request.failure} {request.method} {request.url}")


@dataclass
class Editor:
    """One page with the editor.

    Attributes:
        page: The Playwright page.
        watch: Collects its errors.
    """

    page: Any
    watch: Watch

    def open(self, url: str) -> None:
        """Loads the page and waits until the workflow is shown."""
        self.page.goto(url)
        self.wait_ready()

    def reload(self) -> None:
        """Loads the page again."""
        self.page.reload()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Waits until the workflow is shown."""
        self.page.wait_for_function(_READY, timeout=PATIENCE_MS)

    def wait(self, condition: str, argument: Any = None) -> None:
        """Waits until a JavaScript function of `argument` is true."""
        self.page.wait_for_function(condition, arg=argument, timeout=PATIENCE_MS)

    def wait_value(self, reading: str, argument: Any = None) -> Any:
        """Waits until a JavaScript function of `argument` gives plain data; returns these.

        What is read afterwards may have changed: a node drops its picture while it loads another.
        """
        found = self.page.wait_for_function(reading, arg=argument, timeout=PATIENCE_MS)
        return found.json_value()

    # The graph

    def types(self) -> list[str]:
        """Types of the nodes."""
        return list(self.page.evaluate("() => window.app.graph.nodes.map((node) => node.type)"))

    def load(self, prompt: Mapping[str, Any]) -> None:
        """Opens a graph in the API's form, as dropping such a file does."""
        self.page.evaluate("(prompt) => window.app.loadApiJson(prompt, 'test')", dict(prompt))
        self.wait("(count) => window.app.graph.nodes.length === count", len(prompt))

    def value(self, node_id: int, widget: str) -> Any:
        """Value of a widget."""
        return self.page.evaluate(
            """([id, name]) => window.app.graph.getNodeById(id).widgets
                .find((widget) => widget.name === name).value""",
            [node_id, widget],
        )

    def set(self, node_id: int, **values: Any) -> None:
        """Sets widgets by name."""
        self.page.evaluate(
            """([id, values]) => {
                const { widgets } = window.app.graph.getNodeById(id);
                for (const widget of widgets)
                    if (widget.name in values) widget.value = values[widget.name];
            }""",
            [node_id, values],
        )

    def wait_types(self, types: list[str]) -> None:
        """Waits until the graph has nodes of these types, in this order."""
        assert read_until(self.types, types) == types

    def wait_outlined(self, *node_ids: int) -> None:
        """Waits until these nodes, and no others, are drawn as being in error."""
        expected = list(node_ids)
        assert read_until(lambda: list(self.page.evaluate(_OUTLINED)), expected) == expected

    def click_node(self, node_id: int, widget: str | None = None) -> None:
        """Clicks a node's title bar, or one of its widgets."""
        self.page.evaluate("() => window.app.canvas.draw(true, true)")
        self.page.mouse.click(*self.page.evaluate(_POINT, [node_id, widget]))

    def press_on_selection(self, name: str) -> None:
        """Presses a button of the bar that appears above selected nodes."""
        bar = self.page.get_by_test_id("selection-toolbox")
        bar.get_by_role("button", name=name).click()

    # Running

    def press_run(self) -> None:
        """Presses Run."""
        self.page.get_by_test_id("queue-button").click()

    def wait_picture(self, node_id: int) -> int:
        """Waits until a node shows a picture; returns its width in pixels."""
        shown = "(id) => window.app.graph.getNodeById(id)?.imgs?.[0]?.naturalWidth"
        return int(self.wait_value(shown, node_id))

    def wait_loaded(self, node_id: int, name: str) -> int:
        """Waits until a node shows the picture file of this name; returns its width in pixels."""
        width = self.wait_value(
            """([id, name]) => {
                const node = window.app.graph.getNodeById(id), [shown] = node.imgs ?? [];
                return node.widgets[0].value === name && shown?.naturalWidth > 0
                    && new URL(shown.src).searchParams.get("filename") === name
                    && shown.naturalWidth;
            }""",
            [node_id, name],
        )
        return int(width)

    def colours(self, node_id: int, *points: tuple[float, float]) -> list[list[int]]:
        """RGB of the shown picture, once one is shown, at points (x, y) in 0..1."""
        return list(self.wait_value(_COLOURS, [node_id, [list(point) for point in points]]))

    def count_events(self, *kinds: str) -> None:
        """Counts socket events of these kinds in `window.seen`, in order of arrival."""
        self.page.evaluate(
            """(kinds) => {
                const seen = window.seen = [];  // what was counted before goes on elsewhere
                for (const kind of kinds)
                    window.comfyAPI.api.api.addEventListener(kind, () => seen.push(kind));
            }""",
            list(kinds),
        )

    def seen(self) -> list[str]:
        """What `count_events` has counted."""
        return list(self.page.evaluate("() => window.seen"))

    # Commands, files and panels

    def command(self, name: str) -> None:
        """Runs a command of the editor, as its menu entry or key does."""
        self.page.evaluate("(name) => { window.app.extensionManager.command.execute(name); }", name)

    def setting(self, name: str, value: Any) -> None:
        """Changes a setting."""
        self.page.evaluate(
            "([name, value]) => window.app.extensionManager.setting.set(name, value)",
            [name, value],
        )

    def answer(self, text: str) -> None:
        """Writes into the dialog that asks for one text, and confirms."""
        dialog = self.page.get_by_role("dialog")
        dialog.get_by_role("textbox").fill(text)
        dialog.get_by_role("button", name="Confirm").click()
        dialog.wait_for(state="hidden")

    def drop(self, content: bytes, name: str, kind: str) -> None:
        """Drops a file onto the canvas."""
        self._expect_early_look(name)
        self.page.evaluate(_DROP, [base64.b64encode(content).decode(), name, kind])

    def paste(self, content: bytes, name: str, kind: str) -> None:
        """Pastes a file, as Ctrl+V does when it is on the clipboard."""
        self._expect_early_look(name)
        self.page.evaluate(_PASTE, [base64.b64encode(content).decode(), name, kind])

    def choose_file(self, node_id: int, path: Path, button: str = "upload") -> None:
        """Uploads a file through the node's button."""
        self._expect_early_look(path.name)
        self.wait(
            """([id, name]) => window.app.graph.getNodeById(id).widgets
                .some((widget) => widget.name === name)""",
            [node_id, button],
        )
        with self.page.expect_file_chooser() as chooser:
            self.click_node(node_id, button)
        chooser.value.set_files(path)

    def _expect_early_look(self, name: str) -> None:
        """A node bears the name of a file from the start of its upload, and when the editor happens
        to draw it before the upload's end it asks for the file in vain; it asks again after."""
        query = rf"\?(?=.*\btype=input\b)(?=.*\bfilename={re.escape(name)}(&|$))"
        self.watch.allowed.append(rf"^404 GET /api/view{query}")

    def choose(self, place: Any, entry: str) -> None:
        """Chooses an entry of the menu that a right click opens.

        A click that meets an earlier menu while it closes opens none, so it may be repeated.
        """
        found = self.page.get_by_role("menuitem", name=entry)
        for _ in range(5):
            place.click(button="right")
            with contextlib.suppress(PlaywrightTimeout):
                return found.click(timeout=4000)
        raise AssertionError(f"no menu with the entry {entry!r}")

    def open_panel(self, name: str) -> None:
        """Opens a panel of the side bar: assets, node-library, model-library or workflows."""
        self.page.get_by_test_id(f"{name}-tab-button").click()

    def open_jobs(self) -> Any:
        """Opens the list of jobs and returns it."""
        self.page.get_by_test_id("queue-overlay-toggle").click()
        return self.page.get_by_test_id("job-assets-list")

    def save_as(self, name: str) -> None:
        """Saves the workflow under a new name."""
        self.page.keyboard.press("Control+s")
        self.page.get_by_label("Enter the filename:").fill(name)
        self.page.get_by_role("button", name="Confirm").click()
        self.page.get_by_role("dialog").wait_for(state="hidden")
