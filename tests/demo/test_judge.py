"""The judge is right about every painted picture: a wrong mark is the sampled picture's fault."""

from itertools import islice

import numpy as np
import pytest

from tools.demo_model.brushes import PAINTERS
from tools.demo_model.judge import Request, judge, random_requests
from tools.demo_model.paint import paint
from tools.demo_model.scenes import COLOUR_NAMES, COLOURS, OBJECTS, POSITIONS, SHAPES


@pytest.mark.parametrize("size", [(128, 128), (96, 96), (192, 128), (128, 256), (256, 256)])
def test_every_wish_of_a_painted_request_is_fulfilled(size: tuple[int, int]) -> None:
    for seed, request in enumerate(islice(random_requests(seed=size[0]), 40)):
        marks = request.marks(judge(paint(request.scene(seed), *size)))
        assert all(marks.values()), f"{request.text}: {marks}"


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_is_told_from_the_others(shape: str) -> None:
    for seed in range(5):
        picture = paint(Request("red", shape, "center", "white").scene(seed))
        assert judge(picture).shape == shape


@pytest.mark.parametrize("position", POSITIONS)
def test_only_the_asked_position_counts(position: str) -> None:
    verdict = judge(paint(Request("blue", "circle", position, "yellow").scene(1)))
    assert [place for place in POSITIONS if verdict.is_at(place)] == [position]


@pytest.mark.parametrize("name", COLOUR_NAMES)
def test_a_flat_picture_has_a_background_and_no_object(name: str) -> None:
    verdict = judge(np.full((128, 128, 3), COLOURS[name], np.uint8))
    assert (verdict.background, verdict.colour, verdict.shape) == (name, None, None)


def test_wrong_pictures_get_no_mark_for_what_is_wrong() -> None:
    request = Request("red", "circle", "left", "blue")
    other = Request("green", "star", "right", "white")
    assert not any(request.marks(judge(paint(other.scene(3)))).values())


def test_requests_read_as_people_write_them() -> None:
    assert Request("orange", "ring", "center", "gray").text == "an orange ring on a gray background"
    corner = Request("red", "star", "top left", "blue").text
    assert corner == "a red star in the top left corner on a blue background"


def test_every_kind_of_thing_has_a_painter() -> None:
    assert set(PAINTERS) == {*SHAPES, *OBJECTS}
