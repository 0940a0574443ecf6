"""Pictures that come into the editor: dropped with their graph, uploaded, masked."""

from __future__ import annotations

import io
import json
import mimetypes
from pathlib import Path

import pytest
from PIL import Image

from tests.browser.editor import SAMPLER, SAVE, Editor
from tests.support.server_process import ServerProcess
from tests.support.waiting import read_until

pytestmark = pytest.mark.browser

MASKED = {
    "1": {"class_type": "LoadImage", "inputs": {}},
    "2": {"class_type": "MaskToImage", "inputs": {"mask": ["1", 1]}},
    "3": {"class_type": "PreviewImage", "inputs": {"images": ["2", 0]}},
    "4": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
}
# A canvas of the mask editor differs in its middle from its upper part.
_PAINTED = """() => {
    const shown = [...document.querySelectorAll("#maskEditorCanvasContainer canvas")];
    return shown.some((drawn) => {
        const canvas = new OffscreenCanvas(drawn.width, drawn.height);
        const context = canvas.getContext("2d");
        context.drawImage(drawn, 0, 0);
        const at = (y) => context.getImageData(canvas.width / 2, y * canvas.height, 1, 1).data;
        return at(0.5).join() !== at(0.1).join();
    });
}"""
BLACK, BLUE, WHITE = [0, 0, 0], [40, 90, 200], [255, 255, 255]


@pytest.fixture
def blue_picture(tmp_path: Path) -> Path:
    path = tmp_path / "ball.png"
    Image.new("RGB", (256, 256), tuple(BLUE)).save(path)
    return path


def test_a_picture_dropped_on_the_page_brings_its_graph_back(
    editor: Editor, server: ServerProcess
) -> None:
    text = "a green triangle on a white background"
    editor.set(SAMPLER, steps=2, seed=1234)
    editor.set(2, text=text)
    editor.press_run()
    editor.wait_picture(SAVE)
    server.wait_idle()
    shown = server.get("/api/jobs")["jobs"][0]["preview_output"]
    content = server.get_bytes(f"/view?filename={shown['filename']}&type=output")
    types = editor.types()

    editor.load(MASKED)
    editor.drop(content, "from-the-web.png", "image/png")
    editor.wait("(id) => window.app.graph.getNodeById(id)?.type === 'KSampler'", SAMPLER)
    editor.wait_types(types)
    assert (editor.value(SAMPLER, "seed"), editor.value(SAMPLER, "steps")) == (1234, 2)
    assert editor.value(2, "text") == text


def test_every_kind_of_result_brings_its_graph_back(editor: Editor, server: ServerProcess) -> None:
    workflow = editor.page.evaluate("() => window.app.graph.serialize()")
    types = editor.types()
    flat = {"width": 64, "height": 64, "batch_size": 2, "color": 0xFF0000}
    animation = {"images": ["1", 0], "filename_prefix": "moving", "fps": 6.0}
    latent = {"samples": ["2", 0], "filename_prefix": "kept"}
    clip = {"video": ["6", 0], "filename_prefix": "film", "format": "mp4", "codec": "h264"}
    silence = {"duration": 0.2, "sample_rate": 44100, "channels": 1}
    prompt = {
        "1": {"class_type": "EmptyImage", "inputs": flat},
        "2": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64}},
        "3": {
            "class_type": "SaveAnimatedWEBP",
            "inputs": {**animation, "lossless": True, "quality": 80, "method": "default"},
        },
        "4": {"class_type": "SaveAnimatedPNG", "inputs": {**animation, "compress_level": 4}},
        "5": {"class_type": "SaveLatent", "inputs": latent},
        "6": {"class_type": "CreateVideo", "inputs": {"images": ["1", 0], "fps": 8.0}},
        "7": {"class_type": "SaveVideo", "inputs": clip},
        "8": {"class_type": "EmptyAudio", "inputs": silence},
        "9": {
            "class_type": "SaveAudio",
            "inputs": {"audio": ["8", 0], "filename_prefix": "sound"},
        },
    }
    prompt["2"]["inputs"]["batch_size"] = 1
    done = server.run(prompt, extra_data={"extra_pnginfo": {"workflow": workflow}})
    dropped = {"workflow.json": json.dumps(workflow).encode()}
    for outputs in done["outputs"].values():
        for saved in (
            item for kind in ("images", "latents", "audio") for item in outputs.get(kind, ())
        ):
            content = server.get_bytes(f"/view?filename={saved['filename']}")
            dropped[saved["filename"]] = content
    kinds = {"json", "webp", "png", "latent", "mp4", "flac"}
    assert {name.partition(".")[2] for name in dropped} == kinds
    for name, content in dropped.items():
        editor.load(MASKED)
        editor.drop(content, name, mimetypes.guess_type(name)[0] or "")
        editor.wait_types(types)


def test_pictures_without_a_graph_are_loaded(editor: Editor, server: ServerProcess) -> None:
    def png(colour: tuple[int, int, int]) -> bytes:
        buffer = io.BytesIO()
        Image.new("RGB", (64, 64), colour).save(buffer, "PNG")
        return buffer.getvalue()

    before = set(server.get("/internal/files/input"))
    loaded = "() => window.app.graph.findNodesByType('LoadImage').map((node) => node.id)"
    ids: list[int] = []
    for bring, colour, name in (
        (editor.drop, (10, 200, 30), "plain.png"),
        (editor.paste, (200, 20, 30), "pasted.png"),
    ):
        bring(png(colour), name, "image/png")
        editor.wait(f"(count) => ({loaded})().length > count", len(ids))
        (node_id,) = set(editor.page.evaluate(loaded)) - set(ids)
        assert editor.wait_loaded(node_id, name) == 64
        assert editor.colours(node_id, (0.5, 0.5)) == [list(colour)]
        ids.append(node_id)
    assert set(server.get("/internal/files/input")) - before == {"plain.png", "pasted.png"}


def test_an_uploaded_picture_gets_a_mask_in_the_mask_editor(
    editor: Editor, server: ServerProcess, blue_picture: Path
) -> None:
    page = editor.page
    editor.load(MASKED)
    editor.choose_file(1, blue_picture)
    assert editor.wait_loaded(1, "ball.png") == 256
    assert server.get("/internal/files/input")[0] == "ball.png"

    editor.click_node(1)
    editor.press_on_selection("Open Mask Editor")
    page.get_by_test_id("mask-editor-root").wait_for()
    editor.wait("""() => [...document.querySelectorAll("#maskEditorCanvasContainer canvas")]
        .every((canvas) => canvas.width === 256)""")
    area = page.locator("#maskEditorCanvasContainer canvas").first.bounding_box()
    x, y = area["x"] + area["width"] / 2, area["y"] + area["height"] / 2
    for _ in range(5):  # the editor takes no strokes for a while after it has come
        page.mouse.move(x - 60, y)
        page.mouse.down()
        page.mouse.move(x + 60, y, steps=8)
        page.mouse.up()
        if read_until(lambda: page.evaluate(_PAINTED), True, patience_s=4):
            break
    page.get_by_role("dialog").get_by_role("button", name="Save").click()
    page.get_by_test_id("mask-editor-root").wait_for(state="hidden")
    assert editor.value(1, "image").startswith("clipspace-painted-masked-")

    editor.press_run()
    for node_id in (3, 4):
        assert editor.wait_picture(node_id) == 256
    assert editor.colours(3, (0.5, 0.5), (0.5, 0.1)) == [WHITE, BLACK]
    assert editor.colours(4, (0.5, 0.5), (0.5, 0.1)) == [BLUE, BLUE]
    names = server.get("/internal/files/input")
    assert len([name for name in names if name.startswith("clipspace-")]) == 4
