"""3D files in the editor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

import folder_paths
from comfy_extras.nodes_load_3d import Load3D, Preview3D, model_files


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """Input folder of this test; below it lie the ones for results and temporary files."""
    before = [folder_paths.get_directory_by_type(kind) for kind in ("input", "output", "temp")]
    folder_paths.set_input_directory(str(tmp_path))
    folder_paths.set_output_directory(str(tmp_path / "output"))
    folder_paths.set_temp_directory(str(tmp_path / "temp"))
    yield tmp_path
    folder_paths.set_input_directory(str(before[0]))
    folder_paths.set_output_directory(str(before[1]))
    folder_paths.set_temp_directory(str(before[2]))


def test_3d_files_are_listed_with_their_folders(folders: Path) -> None:
    assert model_files() == []
    (folders / "3d/shapes").mkdir(parents=True)
    for name in ("3d/b.GLB", "3d/shapes/a.obj", "3d/notes.txt"):
        (folders / name).touch()
    assert model_files() == ["3d/b.GLB", "3d/shapes/a.obj"]


def test_what_the_editor_drew_is_read(folders: Path) -> None:
    (folders / "threed").mkdir()
    for name, colour in (("i", (255, 0, 0, 255)), ("m", (0, 0, 0, 0)), ("n", (0, 255, 0, 255))):
        Image.new("RGBA", (4, 2), colour).save(folders / f"threed/{name}.png")
    drawn = {
        "image": "threed/i.png",
        "mask": "threed/m.png",
        "normal": "threed/n.png",
        "camera_info": {"zoom": 1},
        "recording": "",
    }
    made = Load3D.execute("3d/b.glb", drawn, width=4, height=2)
    assert made[0][0, 0, 0].tolist() == [1.0, 0.0, 0.0]
    assert made[1].min() == 1.0
    assert made[2] == "3d/b.glb"
    assert made[3][0, 0, 0].tolist() == [0.0, 1.0, 0.0]
    assert made[4] == {"zoom": 1}
    assert made[5] is None


@pytest.mark.parametrize("name", ["../secret.png", "/etc/passwd"])
def test_no_drawing_is_read_from_elsewhere(name: str, folders: Path) -> None:
    del folders
    drawn = {"image": name, "mask": name, "normal": name, "recording": ""}
    with pytest.raises((ValueError, FileNotFoundError)):
        Load3D.execute("3d/b.glb", drawn)


def test_a_file_is_shown_with_camera_and_background(folders: Path) -> None:
    del folders
    shown = Preview3D.execute("mesh/a.glb", camera_info={"zoom": 2}).ui.as_dict()
    assert shown == {"result": ["mesh/a.glb", {"zoom": 2}, None]}
    behind = Preview3D.execute("a.glb", bg_image=torch.zeros(1, 2, 2, 3)).ui.as_dict()
    assert behind["result"][2].startswith("temp/")


def test_a_file_of_another_folder_is_brought_to_the_viewer(folders: Path) -> None:
    for folder, name in ((folders / "3d", "a.glb"), (folders / "temp", "b.glb")):
        folder.mkdir()
        (folder / name).write_text(name)
    assert Preview3D.execute("3d/a.glb").ui.as_dict()["result"][0] == "3d/a.glb"
    assert Preview3D.execute("b.glb [temp]").ui.as_dict()["result"][0] == "b.glb"
    assert (folders / "output/3d/a.glb").read_text() == "a.glb"
    (folders / "3d/a.glb").write_text("changed")
    Preview3D.execute("3d/a.glb")  # the result of that name is shown, never overwritten
    assert (folders / "output/3d/a.glb").read_text() == "a.glb"
    for outside in ("../a.glb", "/etc/passwd"):
        with pytest.raises(ValueError, match="outside"):
            Preview3D.execute(outside)
