"""Files whose writing an interruption ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from comfy_api.internal.watched_file import watched_file
from comfy_execution.context import interrupt_check


class Stopped(BaseException):
    """Stands for the interruption."""


@pytest.fixture
def looks() -> Iterator[list[int]]:
    """The number of looks for an interruption; the third one finds it."""
    seen = [0]

    def look() -> None:
        seen[0] += 1
        if seen[0] == 3:
            raise Stopped

    token = interrupt_check.set(look)
    yield seen
    interrupt_check.reset(token)


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    with watched_file(tmp_path / "a.png") as file:
        Image.new("RGB", (9, 7), "red").save(file, format="PNG")
    with Image.open(tmp_path / "a.png") as picture:
        assert (picture.size, picture.getpixel((0, 0))) == ((9, 7), (255, 0, 0))


def test_an_encoder_is_stopped_within_a_picture_and_leaves_no_file(
    tmp_path: Path, looks: list[int]
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (600, 600, 3), np.uint8)
    with pytest.raises(Stopped), watched_file(tmp_path / "a.png") as file:
        Image.fromarray(noise).save(file, format="PNG", compress_level=1)
    assert looks[0] < 6  # of about 20
    assert list(tmp_path.iterdir()) == []


def test_a_failing_encoder_leaves_no_file(tmp_path: Path) -> None:
    def fail() -> None:
        with watched_file(tmp_path / "a.png") as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), watched_file(tmp_path / "none" / "a.png"):
        raise AssertionError
