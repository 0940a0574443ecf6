"""Tracks that points of a picture follow in a video."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comfy_extras import nodes_wanmove
from comfy_extras.nodes_wanmove import GenerateTracks, WanMoveConcatTrack, WanMoveTracksFromCoords
from comfy_extras.wan import vace


def line(**changes: Any) -> Any:
    given: dict[str, Any] = {
        "width": 100, "height": 60, "start_x": 0.0, "start_y": 0.5, "end_x": 1.0, "end_y": 0.5,
        "num_frames": 5, "num_tracks": 3, "track_spread": 0.1, **changes,
    }  # fmt: skip
    return GenerateTracks.execute(**given)


def test_parallel_tracks_run_along_a_line() -> None:
    tracks, frames = (line()[n] for n in range(2))
    path = tracks["track_path"]
    assert frames == 5
    assert path.shape == (5, 3, 2)
    assert path[:, 1].tolist() == [
        [0.0, 30.0],
        [25.0, 30.0],
        [50.0, 30.0],
        [75.0, 30.0],
        [100.0, 30.0],
    ]
    assert path[0, :, 1].tolist() == [22.0, 30.0, 38.0]
    assert tracks["track_visibility"].all()


@pytest.mark.parametrize(
    ("pace", "middle"),
    [("linear", 50.0), ("ease_in", 25.0), ("ease_out", 75.0), ("ease_in_out", 50.0)],
)
def test_the_pace_changes_the_way_and_not_its_ends(pace: str, middle: float) -> None:
    path = line(interpolation=pace)[0]["track_path"]
    assert path[[0, 2, 4], 1, 0].tolist() == pytest.approx([0.0, middle, 100.0])
    still = line(interpolation="constant")[0]["track_path"]
    assert (still[:, 1, 0] == 0).all()


def test_a_curve_is_drawn_towards_its_middle() -> None:
    path = line(bezier=True, mid_x=0.5, mid_y=1.0, num_tracks=1)[0]["track_path"][:, 0]
    assert path[2].tolist() == pytest.approx([50.0, 45.0])
    assert path[0].tolist() == [0.0, 30.0]
    assert path[4].tolist() == pytest.approx([100.0, 30.0])


def test_a_mask_says_in_which_frames_tracks_are_seen() -> None:
    mask = torch.zeros(2, 4, 4)
    mask[0, 1, 1] = 1.0
    seen = line(track_mask=mask)[0]["track_visibility"]
    assert seen[:, 0].tolist() == [True, False, False, False, False]


def test_written_coordinates_become_tracks() -> None:
    text = "[[{'x': 1, 'y': 2}, {'x': 3, 'y': 4}], [{'x': 5, 'y': 6}, {'x': 7, 'y': 8}]]"
    made = WanMoveTracksFromCoords.execute(text)
    assert made[0]["track_path"].tolist() == [[[1, 2], [5, 6]], [[3, 4], [7, 8]]]
    assert made[1] == 2
    single = WanMoveTracksFromCoords.execute('[{"x": 1, "y": 2}]')[0]
    joined = WanMoveConcatTrack.execute(single, single)[0]
    assert joined["track_path"].shape == (1, 2, 2)
    assert joined["track_visibility"].shape == (1, 2)
    assert WanMoveConcatTrack.execute(single)[0] is single
    with pytest.raises(ValueError, match=r"tracks_2: expected .* as tracks_1 \(2\), found 1"):
        WanMoveConcatTrack.execute(made[0], single)


@pytest.mark.parametrize("text", ["", "[]", "{}", "nothing", "[[]]", '[[{"x": 1, "y": 2}], []]'])
def test_what_holds_no_tracks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="track_coords"):
        WanMoveTracksFromCoords.execute(text)


@pytest.mark.parametrize(
    "text", ["{", "5", "[]", "[[]]", "[[1]]", '[[{"x": 1}]]', '[[{"x": 1, "y": null}]]', '["ab"]']
)
def test_text_that_holds_no_tracks_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="track_coords"):
        WanMoveTracksFromCoords.execute(text)


@pytest.mark.parametrize("shape", [(20, 50), (1, 1, 20, 50)])
def test_masks_of_tracks_come_with_other_axes_too(shape: tuple[int, ...]) -> None:
    mask = torch.zeros(1, 20, 50)
    mask[0, 3, 4] = 1
    expected = nodes_wanmove.visibility(mask, 5, 2)
    assert torch.equal(nodes_wanmove.visibility(mask.reshape(shape), 5, 2), expected)
    placed = vace.whole_mask(mask, 32, 16, 9)
    assert torch.equal(vace.whole_mask(mask.reshape(shape), 32, 16, 9), placed)
