"""Makes docs/editor.png: the editor with the demo workflow and a finished picture.

Usage: python -m tools.make_screenshot [--text TEXT] [--seed N] [--out FILE]

Starts a server of its own in an empty folder, so nobody's settings or pictures show. Needs
Chromium and the development dependencies.
"""

from __future__ import annotations

import argparse
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.browser.editor import PATIENCE_MS, SAMPLER, SAVE, Editor, Watch
from tests.support.server_process import REPOSITORY, running_server

TEXT_NODE = 2
SIZE = {"width": 1600, "height": 820}  # pixels; the workflow is wide and low
VIEW = {"scale": 1.0, "x": 55.0, "y": 30.0}  # zoom, and where the graph's origin lies
LARGEST_BYTES = 300_000
SETTINGS = {
    "Comfy.VueNodes.Enabled": True,  # this design fits small pictures to their node
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
}


def take_picture(page: Any, url: str, text: str, seed: int) -> bytes:
    """Runs the demo workflow in the editor and returns the page as a PNG."""
    editor = Editor(page, Watch(url))
    editor.open(url)
    page.evaluate(
        """async (settings) => {
            for (const [name, value] of Object.entries(settings))
                await window.app.extensionManager.setting.set(name, value);
        }""",
        SETTINGS,
    )
    editor.reload()
    editor.set(TEXT_NODE, text=text)
    editor.set(SAMPLER, seed=seed, control_after_generate="fixed")
    page.evaluate(
        """({ scale, x, y }) => {
            const { canvas } = window.app;
            canvas.ds.scale = scale;
            canvas.ds.offset = [x / scale, y / scale];
            canvas.setDirty(true, true);
        }""",
        VIEW,
    )
    editor.press_run()
    for node_id in (SAMPLER, SAVE):
        page.locator(f"[data-node-id='{node_id}'] img").first.wait_for()
    page.mouse.move(800, 790)
    page.get_by_text("Job completed").wait_for()
    page.get_by_text("Job completed").wait_for(state="hidden")
    return bytes(page.screenshot())


def smaller(png: bytes) -> bytes:
    """The same picture with at most 256 colours, if it is larger than `LARGEST_BYTES`."""
    if len(png) <= LARGEST_BYTES:
        return png
    reduced = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(256).save(reduced, "PNG", optimize=True)
    return reduced.getvalue()


def main() -> None:
    """Takes the picture and writes it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", default="a boat on the sea at sunset with a sun")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs/editor.png")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise SystemExit("Chromium is not installed; install the package chromium")
    with (
        tempfile.TemporaryDirectory() as folder,
        running_server(Path(folder), "--cpu") as server,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(PATIENCE_MS)
        png = smaller(take_picture(page, server.url, arguments.text, arguments.seed))
        browser.close()
    arguments.out.write_bytes(png)
    print(f"{arguments.out}: {len(png)} bytes")


if __name__ == "__main__":
    main()
