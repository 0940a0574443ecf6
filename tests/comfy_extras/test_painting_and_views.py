"""Pictures that are painted on a node, and views of a subject."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import folder_paths
from comfy_extras.nodes_camera_angle import CameraAngle
from comfy_extras.nodes_painter import Painter


@pytest.fixture
def painting(tmp_path: Path) -> Iterator[str]:
    """A red square that covers the upper left quarter of 64 x 32 pixels, half of it half."""
    before = folder_paths.get_input_directory()
    folder_paths.set_input_directory(str(tmp_path))
    values = np.zeros((32, 64, 4), np.uint8)
    values[:16, :32] = (255, 0, 0, 255)
    values[:16, 16:32, 3] = 128
    Image.fromarray(values).save(tmp_path / "painter-1.png")
    yield "painter-1.png [input]"
    folder_paths.set_input_directory(before)


def test_paint_covers_a_colour(painting: str) -> None:
    picture, covered = Painter.execute(painting, 64, 32, "#0000ff").args
    assert picture.shape == (1, 32, 64, 3)
    assert picture[0, 0, 0].tolist() == [1.0, 0.0, 0.0]
    assert picture[0, 0, 20].tolist() == pytest.approx([128 / 255, 0.0, 127 / 255])
    assert picture[0, 20, 0].tolist() == [0.0, 0.0, 1.0]
    assert [covered[0, 0, x].item() for x in (0, 20, 40)] == pytest.approx([1.0, 128 / 255, 0.0])


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_paint_covers_every_picture_of_a_batch_in_its_size(painting: str, channels: int) -> None:
    given = torch.full((2, 64, 128, channels), 0.5)
    picture, covered = Painter.execute(painting, 512, 512, "#ffffff", given).args
    assert picture.shape == (2, 64, 128, 3)
    assert covered.shape == (1, 64, 128)
    assert picture[:, 0, 0].tolist() == [[1.0, 0.0, 0.0]] * 2
    assert picture[:, -1, -1].tolist() == [[0.5] * 3] * 2
    assert (given == 0.5).all()


def test_nothing_painted_is_the_picture_and_no_mask() -> None:
    picture, covered = Painter.execute("", 128, 64, "#336699").args
    assert picture.shape == (1, 64, 128, 3)
    assert picture[0, 3, 3].tolist() == pytest.approx([0.2, 0.4, 0.6])
    assert covered.shape == (1, 64, 128)
    assert covered.sum() == 0


def test_what_was_painted_decides_whether_the_node_runs_again(
    painting: str, tmp_path: Path
) -> None:
    before = Painter.fingerprint_inputs(painting)
    Image.new("RGBA", (8, 8)).save(tmp_path / "painter-1.png")
    assert Painter.fingerprint_inputs(painting) != before
    assert Painter.fingerprint_inputs("") == ""


def test_a_painting_that_another_node_names_is_known_when_it_runs() -> None:
    assert Painter.validate_inputs(None) is True
    assert Painter.fingerprint_inputs(None) == ""


def test_paint_with_far_too_many_pixels_is_refused(
    painting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64)
    with pytest.raises(ValueError, match=r"mask: expected a picture.*exceeds limit"):
        Painter.execute(painting, 64, 64, "#000000")


def test_paint_that_is_not_there_is_named(painting: str, tmp_path: Path) -> None:
    assert Painter.validate_inputs(painting) is True
    assert Painter.validate_inputs("") is True
    assert "'gone.png [input]' is not there" in Painter.validate_inputs("gone.png [input]")
    assert "is not there" in str(Painter.validate_inputs("../gone.png"))
    (tmp_path / "painter-1.png").write_text("no picture")
    with pytest.raises(ValueError, match="mask: expected a picture"):
        Painter.execute(painting, 64, 64, "#000000")
    (tmp_path / "painter-1.png").unlink()
    with pytest.raises(ValueError, match="mask: expected a picture"):
        Painter.execute(painting, 64, 64, "#000000")
    with pytest.raises(ValueError, match="bg_color: expected a colour as #rrggbb, found 'reddish'"):
        Painter.execute("", 64, 64, "reddish")


@pytest.mark.parametrize(
    ("angles", "words"),
    [
        ((0, 0, 5.0), "front view eye-level shot medium shot"),
        ((333, 17, 5), "front-left quarter view elevated shot medium shot"),
        ((22, -16, 1.9), "front view low-angle shot wide shot"),
        ((23, -15, 2.0), "front-right quarter view eye-level shot medium shot"),
        ((90, 45, 6.0), "right side view high-angle shot close-up"),
        ((180, 44, 10.0), "back view elevated shot close-up"),
        ((338, 15, 0.0), "front view elevated shot wide shot"),
        ((360, 60, 5.9), "front view high-angle shot medium shot"),
    ],
)
def test_a_view_is_told_in_words(angles: tuple[int, int, float], words: str) -> None:
    assert CameraAngle.execute(*angles).args[1] == words


@pytest.mark.parametrize(
    ("angles", "place"),
    [
        ((0, 0), (0, 0, 6)),
        ((90, 0), (6, 0, 0)),
        ((180, 0), (0, 0, -6)),
        ((270, 0), (-6, 0, 0)),
        ((0, 60), (0, 6 * 0.75**0.5, 3)),
        ((90, -30), (6 * 0.75**0.5, -3, 0)),
    ],
)
def test_the_camera_stands_six_units_from_the_subject(
    angles: tuple[int, int], place: tuple[float, float, float]
) -> None:
    camera = CameraAngle.execute(*angles, 5.0).args[0]
    found = [camera["position"][axis] for axis in "xyz"]
    assert found == pytest.approx(place, abs=1e-9)
    assert camera["target"] == {"x": 0.0, "y": 0.0, "z": 0.0}
    assert (camera["cameraType"], camera["fov"]) == ("perspective", 35)


@pytest.mark.parametrize(("zoom", "factor"), [(0.0, 1.0), (5.0, 1.4375), (10.0, 1.875)])
def test_the_zoom_of_the_node_is_a_factor_of_the_camera(zoom: float, factor: float) -> None:
    assert CameraAngle.execute(0, 0, zoom).args[0]["zoom"] == pytest.approx(factor)
