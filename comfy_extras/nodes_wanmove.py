"""Tracks that points of a picture follow in a video.

TRACKS hold `track_path` [frames, tracks, 2] in pixels (x, y) and `track_visibility`
[frames, tracks].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of
from comfy_extras.wan.moves import WanMoveTrackToVideo, WanMoveVisualizeTracks
from comfy_extras.wan.track_text import EXAMPLE, Track, read_json, read_track
from comfy_nodes.picture_basics import masks_of

CATEGORY = "conditioning/video_models"
Tracks = dict[str, Any]

# Share of the way that is done, for each share of the time.
PACES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda t: t,
    "ease_in": lambda t: t**2,
    "ease_out": lambda t: 1 - (1 - t) ** 2,
    "ease_in_out": lambda t: t * t * (3 - 2 * t),
    "constant": torch.zeros_like,
}


def visibility(mask: Tensor | None, frames: int, tracks: int) -> Tensor:
    """Where tracks are seen [frames, tracks]: in frames whose mask has any place, or in all."""
    if mask is None:
        return torch.ones(frames, tracks, dtype=torch.bool)
    seen = (masks_of(mask) > 0).flatten(1).any(dim=1)[:frames]
    if seen.shape[0] < frames:
        seen = torch.cat([seen, seen[-1:].expand(frames - seen.shape[0])])
    return seen[:, None].expand(frames, tracks).clone()


def made(path: Tensor, mask: Tensor | None) -> io.NodeOutput:
    """Tracks and their number of frames."""
    frames, count = path.shape[:2]
    tracks = {"track_path": path, "track_visibility": visibility(mask, frames, count)}
    return io.NodeOutput(tracks, frames)


def tracks_outputs() -> list[io.Output]:
    """Tracks and their number of frames."""
    return [io.Tracks.Output(), io.Int.Output(display_name="track_length")]


class WanMoveTracksFromCoords(io.ComfyNode):
    """Tracks from written coordinates."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanMoveTracksFromCoords",
            category=CATEGORY,
            inputs=[
                io.String.Input("track_coords", force_input=True, default="[]", optional=True),
                io.Mask.Input("track_mask", optional=True),
            ],
            outputs=tracks_outputs(),
        )

    @classmethod
    def execute(cls, track_coords: str = "[]", track_mask: Tensor | None = None) -> io.NodeOutput:
        points = torch.tensor(parsed_tracks(track_coords), dtype=torch.float32)
        return made(points.transpose(0, 1).contiguous(), track_mask)


def parsed_tracks(text: str) -> list[Track]:
    """Tracks of one length; a list of points alone is one track.

    Raises:
        ValueError: The text is no JSON list of these.
    """
    given = read_json(text, "track_coords")
    if isinstance(given, list) and given and isinstance(given[0], dict):
        given = [given]
    if not isinstance(given, list):
        raise ValueError(f"track_coords: expected a list such as {EXAMPLE}, found {text[:80]!r}")
    tracks = [read_track(track, "track_coords") for track in given]
    lengths = {len(track) for track in tracks}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"track_coords: expected one or more tracks of one length, such as {EXAMPLE}, found "
            f"tracks of {sorted(lengths)} points"
        )
    return tracks


class WanMoveConcatTrack(io.ComfyNode):
    """The tracks of two inputs together."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanMoveConcatTrack",
            category=CATEGORY,
            inputs=[io.Tracks.Input("tracks_1"), io.Tracks.Input("tracks_2", optional=True)],
            outputs=[io.Tracks.Output()],
        )

    @classmethod
    def execute(cls, tracks_1: Tracks, tracks_2: Tracks | None = None) -> io.NodeOutput:
        if tracks_2 is None:
            return io.NodeOutput(tracks_1)
        first, second = tracks_1["track_path"].shape[0], tracks_2["track_path"].shape[0]
        if first != second:
            raise ValueError(
                f"tracks_2: expected tracks of as many frames as tracks_1 ({first}), found {second}"
            )
        names = ("track_path", "track_visibility")
        return io.NodeOutput(
            {name: torch.cat([tracks_1[name], tracks_2[name]], dim=1) for name in names}
        )


def share_input(id: str, default: float) -> io.Float.Input:
    """A place as a share of the picture's side."""
    return io.Float.Input(id, default=default, min=0.0, max=1.0, step=0.01)


class GenerateTracks(io.ComfyNode):
    """Parallel tracks along a line or a curve."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def side(id: str, default: int) -> io.Int.Input:
            return io.Int.Input(id, default=default, min=16, max=4096, step=16)

        return io.Schema(
            node_id="GenerateTracks",
            category=CATEGORY,
            inputs=[
                side("width", 832),
                side("height", 480),
                share_input("start_x", 0.0),
                share_input("start_y", 0.0),
                share_input("end_x", 1.0),
                share_input("end_y", 1.0),
                io.Int.Input("num_frames", default=81, min=1, max=1024),
                io.Int.Input("num_tracks", default=5, min=1, max=100),
                io.Float.Input("track_spread", default=0.025, min=0.0, max=1.0, step=0.001),
                io.Boolean.Input("bezier", default=False),
                share_input("mid_x", 0.5),
                share_input("mid_y", 0.5),
                io.Combo.Input("interpolation", options=list(PACES)),
                io.Mask.Input("track_mask", optional=True),
            ],
            outputs=tracks_outputs(),
        )

    @classmethod
    def execute(
        cls,
        width: int,
        height: int,
        start_x: float,
        start_y: float,
        end_x: float,
        end_y: float,
        num_frames: int,
        num_tracks: int,
        track_spread: float,
        bezier: bool = False,
        mid_x: float = 0.5,
        mid_y: float = 0.5,
        interpolation: str = "linear",
        track_mask: Tensor | None = None,
    ) -> io.NodeOutput:
        size = torch.tensor([width, height], dtype=torch.float32)
        start, middle, end = (
            torch.tensor(place) * size
            for place in ((start_x, start_y), (mid_x, mid_y), (end_x, end_y))
        )
        t = PACES[interpolation](torch.linspace(0, 1, num_frames))[:, None]
        if bezier:
            centre = (1 - t) ** 2 * start + 2 * (1 - t) * t * middle + t**2 * end
            direction = 2 * (1 - t) * (middle - start) + 2 * t * (end - middle)
        else:
            centre = start + t * (end - start)
            direction = (end - start).expand(num_frames, 2)
        length = direction.norm(dim=1, keepdim=True)
        across = torch.stack([-direction[:, 1], direction[:, 0]], dim=1) / length.clamp(min=1e-6)
        distance = track_spread * (width + height) / 2  # pixels between neighbours
        offsets = (torch.arange(num_tracks) - (num_tracks - 1) / 2) * distance
        return made(centre[:, None] + across[:, None] * offsets[None, :, None], track_mask)


comfy_entrypoint = entrypoint_of(
    WanMoveTrackToVideo,
    WanMoveTracksFromCoords,
    WanMoveConcatTrack,
    WanMoveVisualizeTracks,
    GenerateTracks,
)
