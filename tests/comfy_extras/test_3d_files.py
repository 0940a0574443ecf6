"""3D files that are made of meshes, saved and shown; rectangles and colours."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch

import folder_paths
from comfy_api.latest import Types
from comfy_extras.nodes_3d_files import MeshToFile3D, Preview3DAdvanced, Save3DAdvanced
from comfy_extras.nodes_images import ImageCropV2, PrimitiveBoundingBox
from comfy_extras.nodes_primitive import Colour

CAMERA = {"position": {"x": 0, "y": 1, "z": 2}, "zoom": 1}
PLACES = [{"position": {"x": 0, "y": 0, "z": 0}}]
VIEW = {"camera_info": CAMERA, "model_3d_info": PLACES}


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """Below it lie the folders for results and temporary files."""
    before = [folder_paths.get_directory_by_type(kind) for kind in ("output", "temp")]
    folder_paths.set_output_directory(str(tmp_path / "output"))
    folder_paths.set_temp_directory(str(tmp_path / "temp"))
    yield tmp_path
    folder_paths.set_output_directory(str(before[0]))
    folder_paths.set_temp_directory(str(before[1]))


def mesh(batch: int = 1) -> Any:
    """Triangles."""
    vertices = torch.tensor([[[0.0, 0, 0], [1, 0, 0], [0, 1, 0]]]).repeat(batch, 1, 1)
    return Types.MESH(vertices, torch.tensor([[[0, 1, 2]]]).repeat(batch, 1, 1))


@pytest.mark.parametrize("suffix", ["glb", "obj"])
def test_a_file_is_saved_and_handed_on(folders: Path, suffix: str) -> None:
    file = Types.File3D(BytesIO(b"content"), suffix)
    output = Save3DAdvanced.execute(file, "3d/shape", VIEW, 640, 480)
    assert output.args == (file, PLACES, CAMERA, 640, 480)
    (saved,) = output.ui["3d"]
    assert (saved["subfolder"], saved["type"]) == ("3d", "output")
    assert (folders / "output/3d" / saved["filename"]).read_bytes() == b"content"
    assert saved["filename"] == f"shape_00001_.{suffix}"
    assert output.ui["camera_info"] == [CAMERA]
    assert output.ui["model_3d_info"] == PLACES


def test_a_mesh_is_shown_from_a_temporary_file(folders: Path) -> None:
    (file,) = MeshToFile3D.execute(mesh()).args
    other = {"zoom": 3}
    output = Preview3DAdvanced.execute(file, "", 64, 64, [], other)
    assert output.args[1:3] == ([], other)
    (saved,) = output.ui["3d"]
    assert saved["type"] == "temp"
    assert (folders / "temp" / saved["filename"]).read_bytes()[:4] == b"glTF"


@pytest.mark.parametrize("view", ["", None, {}])
def test_no_view_is_no_camera_and_no_places(folders: Path, view: Any) -> None:
    del folders
    (file,) = MeshToFile3D.execute(mesh()).args
    assert Preview3DAdvanced.execute(file, view, 64, 64).args[1:3] == ([], None)


@pytest.mark.parametrize("suffix", ["", "exe", "html"])
def test_what_is_no_3d_file_is_not_written(folders: Path, suffix: str) -> None:
    with pytest.raises(ValueError, match="model_3d: expected a file of a format among glb"):
        Save3DAdvanced.execute(Types.File3D(BytesIO(b"x"), suffix), "a", VIEW, 64, 64)
    assert list(folders.rglob("*.*")) == []


def test_one_mesh_of_several_is_taken_and_none_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        (several,) = MeshToFile3D.execute(mesh(3)).args
    assert "there are 3: the first is taken" in caplog.text
    assert several.get_bytes() == MeshToFile3D.execute(mesh()).args[0].get_bytes()
    empty = Types.MESH(torch.zeros(1, 3, 3), torch.zeros(1, 0, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="expected triangles"):
        MeshToFile3D.execute(empty)
    with pytest.raises(ValueError, match=r"found shapes \(3, 3\)"):
        MeshToFile3D.execute(Types.MESH(torch.zeros(3, 3), torch.zeros(0, 3)))


@pytest.mark.parametrize(
    ("box", "rows", "columns"),
    [
        ((2, 1, 3, 2), (1, 3), (2, 5)),
        ((6, 3, 512, 512), (3, 4), (6, 8)),
        ((99, 99, 5, 5), (3, 4), (7, 8)),
    ],
)
def test_a_drawn_rectangle_is_cut_out(
    box: tuple[int, int, int, int], rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    picture = torch.arange(4 * 8 * 3.0).reshape(1, 4, 8, 3)
    region = PrimitiveBoundingBox.execute(*box)[0]
    made = ImageCropV2.execute(picture, region)[0]
    assert torch.equal(made, picture[:, slice(*rows), slice(*columns)])


def test_one_box_of_a_list_is_cut_out_and_what_is_none_is_named() -> None:
    picture = torch.arange(4 * 8 * 3.0).reshape(1, 4, 8, 3)
    region = PrimitiveBoundingBox.execute(2, 1, 3, 2)[0]
    assert torch.equal(ImageCropV2.execute(picture, [region])[0], picture[:, 1:3, 2:5])
    for wrong in ([], [region, region], None, "2"):
        with pytest.raises(ValueError, match="crop_region: expected one rectangle"):
            ImageCropV2.execute(picture, wrong)


@pytest.mark.parametrize("wrong", [{"x": -1}, {"width": 0}, {"height": None}, {"y": "2"}])
def test_what_is_no_rectangle_is_named(wrong: dict[str, Any]) -> None:
    region = {"x": 0, "y": 0, "width": 2, "height": 2} | wrong
    with pytest.raises(ValueError, match=f"crop_region: expected {next(iter(wrong))} as a whole"):
        ImageCropV2.execute(torch.zeros(1, 4, 4, 3), region)


@pytest.mark.parametrize(
    ("colour", "expected"),
    [
        ("#ff5733", (0xFF5733, "#ff5733", 1.0)),
        ("#0A929933", (0x0A9299, "#0A9299", 0.2)),
    ],
)
def test_a_colour_is_a_number(colour: str, expected: tuple[int, str, float]) -> None:
    assert Colour.execute(colour).args == expected


@pytest.mark.parametrize("colour", ["", "ff5733", "#ff573", "#gg0000", "#ff57331"])
def test_what_is_no_colour_is_named(colour: str) -> None:
    with pytest.raises(ValueError, match="color: expected #RRGGBB or #RRGGBBAA"):
        Colour.execute(colour)
