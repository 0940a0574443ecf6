"""Boxes drawn on a canvas, as records, elements and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import folder_paths
from comfy_extras.nodes_bounding_boxes import CreateBoundingBoxes

WORDS = {"type": "text", "text": "MOSS", "desc": "lime letters", "palette": ["#00ff00"]}
LETTERS = {"x": 256, "y": 0, "width": 256, "height": 128, "metadata": WORDS}
THING = {
    "x": 0, "y": 64, "width": 512, "height": 64,
    "metadata": {"type": "obj", "text": "", "desc": "bark", "palette": []},
}  # fmt: skip
ELEMENTS = [
    {"type": "text", "bbox": [0, 500, 500, 1000], "text": "MOSS", "desc": "lime letters",
     "color_palette": ["#00ff00"]},
    {"type": "obj", "bbox": [250, 0, 500, 1000], "desc": "bark"},
]  # fmt: skip


@pytest.fixture
def temp(tmp_path: Path) -> Iterator[Path]:
    """Temporary folder of this test."""
    before = folder_paths.get_temp_directory()
    folder_paths.set_temp_directory(str(tmp_path))
    yield tmp_path
    folder_paths.set_temp_directory(before)


def made(state: Any, **more: Any) -> Any:
    return CreateBoundingBoxes.execute(512, 256, state, **more)


def test_boxes_have_pixels_elements_and_a_picture() -> None:
    picture, boxes, elements = made([LETTERS, THING]).args
    assert boxes == [
        {"x": 256, "y": 0, "width": 256, "height": 128},
        {"x": 0, "y": 64, "width": 512, "height": 64},
    ]
    assert elements == ELEMENTS
    assert picture.shape == (1, 256, 512, 3)
    green = picture[0, :, :, 1] - picture[0, :, :, 0]
    assert green[2, 500] > 0.9  # the colour's band at the upper edge of the first box
    assert green[:, :256].abs().max() == 0  # none outside of it
    assert picture[0, 200:].unique().numel() == 1  # and nothing below


def test_no_box_is_an_empty_canvas() -> None:
    picture, boxes, elements = made([]).args
    assert (boxes, elements) == ([], [])
    assert picture.unique().numel() == 1


@pytest.mark.parametrize(
    "given", [[LETTERS, THING], ELEMENTS, json.dumps(ELEMENTS), json.dumps([LETTERS, THING])]
)
def test_new_boxes_from_before_go_first_and_are_shown_in_the_editor(given: Any) -> None:
    drawn = [{**THING, "x": 1}]
    output = made(drawn, bboxes=given)
    assert output.args[2] == ELEMENTS
    assert output.ui["input_bboxes"] == [LETTERS, THING]
    # The canvas took them over and was drawn on since: what is drawn counts.
    assert made(drawn, bboxes=given, last_incoming=[LETTERS, THING]).args[1][0]["x"] == 1
    assert made(drawn, bboxes="").args[1][0]["x"] == 1


def test_one_box_of_numbers_only_is_enough() -> None:
    place = {"x": 1, "y": 2, "width": 3, "height": 4}
    _, boxes, elements = made([], bboxes=place).args
    assert boxes == [place]
    assert elements[0]["desc"] == ""


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("not json", "text that is no JSON"),
        (7, "expected boxes with x, y, width and height.*found 7"),
        ([{"x": 1, "y": 2}], "bboxes 1: expected boxes"),
        ([THING, {"bbox": [1, 2, 3]}], "bboxes 2: expected boxes"),
        ([{**THING, "x": float("nan")}], "bboxes 1: expected boxes"),
    ],
)
def test_what_is_no_box_is_named(given: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        made([], bboxes=given)


def test_a_picture_lies_dimmed_under_the_boxes(temp: Path) -> None:
    output = made([THING], background=torch.ones(2, 64, 64, 4))
    assert output.args[0][0, 0, 0].tolist() == pytest.approx([0.25] * 3, abs=0.01)
    (saved,) = output.ui["background_images"]
    assert (temp / saved["filename"]).is_file()


def test_a_box_beyond_the_canvas_is_drawn_as_far_as_it_is_on_it() -> None:
    box = {**LETTERS, "x": 500, "y": -20, "width": 100}
    picture, _, elements = made([box, {**THING, "width": 0}]).args
    assert picture.shape == (1, 256, 512, 3)
    assert elements[0]["bbox"] == [0, 977, 422, 1000]


@pytest.mark.parametrize("far", [10**6, 10**9 - 1000])
def test_a_box_that_ends_far_away_is_drawn_like_one_that_ends_near(far: int) -> None:
    """It takes neither its size in memory nor its length in time."""
    near, distant = (
        made([{"x": 100, "y": 50, "width": size, "height": size}]).args[0] for size in (1200, far)
    )
    assert torch.equal(near, distant)
    around = made([{"x": -far, "y": -far, "width": far + 600, "height": far + 600}]).args[0]
    assert around.unique().numel() == 1
    assert not torch.equal(around, made([]).args[0])
