"""Sounds, videos and 3D files: uploaded on their nodes, shown there, and saved."""

from __future__ import annotations

import json
import struct
import wave
from pathlib import Path

import pytest

from tests.browser.editor import Editor
from tests.support.server_process import ServerProcess

pytestmark = pytest.mark.browser

# Every player on the page can play what it was given, to its end.
_PLAYABLE = """([kind, count]) => {
    const players = [...document.querySelectorAll(kind)].filter((player) => player.src);
    return players.length === count
        && players.every((player) => player.readyState >= 2 && player.duration > 0.4);
}"""
# The viewer of a node holds a model, and its camera looks at it.
_DRAWN = "(id) => window.app.graph.getNodeById(id).properties['Last Time Model File']"


def triangle() -> bytes:
    """A GLB file with one triangle."""
    corners = struct.pack("<9f", 0, 0, 0, 1, 0, 0, 0, 1, 0)
    mesh = {"primitives": [{"attributes": {"POSITION": 0}}]}
    position = {
        "bufferView": 0,
        "componentType": 5126,
        "count": 3,
        "type": "VEC3",
        "min": [0, 0, 0],
        "max": [1, 1, 0],
    }
    scene = {
        "asset": {"version": "2.0"},
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0}],
        "meshes": [mesh],
        "buffers": [{"byteLength": len(corners)}],
        "bufferViews": [{"buffer": 0, "byteLength": len(corners)}],
        "accessors": [position],
    }
    text = json.dumps(scene).encode()
    text += b" " * (-len(text) % 4)
    size = 12 + 8 + len(text) + 8 + len(corners)
    head = struct.pack("<4sII", b"glTF", 2, size) + struct.pack("<I4s", len(text), b"JSON")
    return head + text + struct.pack("<I4s", len(corners), b"BIN\0") + corners


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    """Half a second of silence."""
    path = tmp_path / "silence.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(8000))
    return path


def test_a_sound_is_uploaded_saved_and_played(editor: Editor, sound: Path) -> None:
    editor.load(
        {
            "1": {"class_type": "LoadAudio", "inputs": {}},
            "2": {"class_type": "PreviewAudio", "inputs": {"audio": ["1", 0]}},
            "3": {"class_type": "SaveAudioMP3", "inputs": {"audio": ["1", 0]}},
        }
    )
    editor.choose_file(1, sound)
    editor.wait(_PLAYABLE, ["audio", 1])
    editor.press_run()
    editor.wait(_PLAYABLE, ["audio", 3])


def test_a_video_is_made_uploaded_and_played(
    editor: Editor, server: ServerProcess, tmp_path: Path
) -> None:
    flat = {"width": 64, "height": 64, "batch_size": 8, "color": 0xFF}
    made = server.run(
        {
            "1": {"class_type": "EmptyImage", "inputs": flat},
            "2": {"class_type": "CreateVideo", "inputs": {"images": ["1", 0], "fps": 8.0}},
            "3": {
                "class_type": "SaveVideo",
                "inputs": {
                    "video": ["2", 0],
                    "filename_prefix": "clip",
                    "format": "auto",
                    "codec": "auto",
                },
            },
        }
    )
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(server.picture(made, "3"))
    editor.load(
        {
            "1": {"class_type": "LoadVideo", "inputs": {}},
            "2": {"class_type": "SaveVideo", "inputs": {"video": ["1", 0]}},
        }
    )
    editor.choose_file(1, clip)
    editor.wait(_PLAYABLE, ["video", 1])
    editor.press_run()
    editor.wait(_PLAYABLE, ["video", 2])


def test_a_3d_file_is_uploaded_drawn_and_shown_again(
    editor: Editor, server: ServerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "triangle.glb"
    file.write_bytes(triangle())
    editor.load(
        {
            "1": {"class_type": "Load3D", "inputs": {"width": 64, "height": 64}},
            "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
            "3": {"class_type": "Preview3D", "inputs": {"model_file": ["1", 2]}},
        }
    )
    editor.choose_file(1, file, "upload 3d model")
    editor.wait("() => window.app.graph.getNodeById(1).widgets[0].value === '3d/triangle.glb'")
    editor.press_run()
    assert editor.wait_picture(2) == 64
    editor.wait(f"(id) => ({_DRAWN})(id) === '3d/triangle.glb'", 3)
    assert (server.base / "output/3d/triangle.glb").is_file()
