"""Wan-Move: a picture's features are put where tracks lead to, and tracks are drawn on videos.

Source: Chu et al. 2025, https://arxiv.org/abs/2512.08765.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from comfy_api.latest import io
from comfy_extras.declarations import pair_and_latent_outputs, pair_inputs
from comfy_extras.video_frames import cells_of, encoded_frames, padded_frames, with_values
from comfy_extras.wan.common import CELL, CHANNELS, TIME, empty, size_inputs, vision_input

CATEGORY = "conditioning/video_models"
Tracks = dict[str, Any]
COLOURS = ((102, 153, 255), (0, 255, 255), (255, 255, 0), (255, 102, 204), (0, 255, 0))


def seen_of(tracks: Tracks) -> Tensor:
    """Where tracks are seen [frames, tracks]; everywhere if they do not say."""
    path: Tensor = tracks["track_path"]
    seen: Tensor | None = tracks.get("track_visibility")
    return torch.ones(path.shape[:2], dtype=torch.bool) if seen is None else seen.bool()


def cells_on_tracks(tracks: Tracks, size: tuple[int, int], length: int) -> tuple[Tensor, Tensor]:
    """The latent cell of each track at each cell in time [T, N, 2] (row, column), and whether it
    is seen there [T, N].

    Args:
        size: Width and height of the picture in pixels.
        length: Frames of the video; each cell in time takes its first frame.
    """
    path = tracks["track_path"][:length:TIME]
    inside = ((path >= 0) & (path < torch.tensor(size))).all(dim=-1)
    seen = seen_of(tracks)[:length:TIME] & inside
    places = (path / CELL).floor().long().flip(-1)
    return torch.where(seen[..., None], places, 0), seen


def features_on_tracks(latent: Tensor, places: Tensor, seen: Tensor, strength: float) -> Tensor:
    """A copy of a latent [B, C, T, H, W] with the first cell's features along tracks.

    Where tracks meet, the last one counts. A track that is not seen at first moves nothing.
    """
    moved = latent.clone()
    cells = min(places.shape[0], latent.shape[2])
    for cell in range(1, cells):
        for track in (seen[0] & seen[cell]).nonzero().flatten().tolist():
            source = latent[:, :, 0, places[0, track, 0], places[0, track, 1]]
            row, column = places[cell, track].tolist()
            there = latent[:, :, cell, row, column]
            moved[:, :, cell, row, column] = there + (source - there) * strength
    return moved


class WanMoveTrackToVideo(io.ComfyNode):
    """Asks a Wan-Move model to go on from a picture whose parts follow tracks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanMoveTrackToVideo",
            category=CATEGORY,
            inputs=[
                *pair_inputs(),
                io.Vae.Input("vae"),
                io.Tracks.Input("tracks", optional=True),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.01,
                    tooltip="How much of the features is moved; 0: the tracks have no effect.",
                ),
                *size_inputs(),
                io.Image.Input("start_image"),
                vision_input(),
            ],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def execute(
        cls,
        positive: Any,
        negative: Any,
        vae: Any,
        width: int,
        height: int,
        length: int,
        batch_size: int,
        strength: float,
        tracks: Tracks | None = None,
        start_image: Tensor | None = None,
        clip_vision_output: Any = None,
    ) -> io.NodeOutput:
        latent = empty(batch_size, width, height, length)
        both: dict[str, Any] = {}
        if clip_vision_output is not None:
            both["clip_vision_output"] = clip_vision_output
        moved = {}
        if start_image is not None:
            video = padded_frames(start_image, width, height, length)
            encoded = encoded_frames(vae, video, CHANNELS)
            mask = torch.ones(1, 1, latent.shape[2], *encoded.shape[-2:])
            mask[:, :, : cells_of(min(length, start_image.shape[0]), TIME)] = 0.0
            both.update(concat_latent_image=encoded, concat_mask=mask)
            if tracks is not None and strength > 0:
                places = cells_on_tracks(tracks, (width, height), length)
                moved["concat_latent_image"] = features_on_tracks(encoded, *places, strength)
        pair = [
            with_values({**both, **moved}, positive)[0],
            with_values(both, negative)[0],
        ]
        return io.NodeOutput(*pair, {"samples": latent})


class Pen:
    """Draws tracks on one frame.

    Args:
        size: Width and height of the frame.
        opacity: 0..1; lines fade from it to nothing towards their beginning.
    """

    def __init__(self, size: tuple[int, int], opacity: float) -> None:
        self.layer = Image.new("RGBA", size, (0, 0, 0, 0))
        self.opacity = opacity

    def dot(self, place: Tensor, radius: int, colour: tuple[int, int, int]) -> None:
        """A disc around a place."""
        x, y = place.tolist()
        box = (x - radius, y - radius, x + radius, y + radius)
        ImageDraw.Draw(self.layer).ellipse(box, fill=(*colour, int(255 * self.opacity)))

    def line(self, places: Tensor, width: int, colour: tuple[int, int, int]) -> None:
        """A line through places [n, 2], the broader and clearer the nearer to the last one."""
        steps = (places[1:] - places[:-1]).float().norm(dim=1)
        total = float(steps.sum())
        if total == 0:
            return
        shares = (steps.cumsum(0) / total).tolist()
        draw = ImageDraw.Draw(self.layer)
        for share, begin, end in zip(shares, places[:-1].tolist(), places[1:].tolist()):
            ink = (*colour, int(255 * share * self.opacity))
            draw.line([tuple(begin), tuple(end)], fill=ink, width=max(int(width * share), 1))

    def on(self, frame: Tensor) -> Tensor:
        """A frame [H, W, 3] with the drawing on it."""
        raw = torch.frombuffer(bytearray(self.layer.tobytes()), dtype=torch.uint8)
        layer = raw.reshape(*frame.shape[:2], 4).float() / 255.0
        alpha = layer[..., 3:]
        return layer[..., :3] * alpha + frame * (1 - alpha)


class WanMoveVisualizeTracks(io.ComfyNode):
    """Draws tracks on a video, or on a picture that is shown for as long as they last."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def pixels(id: str, default: int, most: int) -> io.Int.Input:
            return io.Int.Input(id, default=default, min=1, max=most)

        return io.Schema(
            node_id="WanMoveVisualizeTracks",
            category=CATEGORY,
            inputs=[
                io.Image.Input("images"),
                io.Tracks.Input("tracks", optional=True),
                pixels("line_resolution", 24, 1024),
                pixels("circle_size", 12, 128),
                io.Float.Input("opacity", default=0.75, min=0.0, max=1.0, step=0.01),
                pixels("line_width", 16, 128),
            ],
            outputs=[io.Image.Output()],
        )

    @classmethod
    def execute(
        cls,
        images: Tensor,
        line_resolution: int,
        circle_size: int,
        opacity: float,
        line_width: int,
        tracks: Tracks | None = None,
    ) -> io.NodeOutput:
        if tracks is None:
            return io.NodeOutput(images)
        path, seen = tracks["track_path"].long(), seen_of(tracks)
        frames = images[..., :3]
        if frames.shape[0] < path.shape[0]:  # a short video begins anew
            frames = frames[torch.arange(path.shape[0]) % frames.shape[0]]
        drawn = []
        for number, frame in enumerate(frames[: path.shape[0]]):
            pen = Pen((frame.shape[1], frame.shape[0]), opacity)
            begin = max(number - line_resolution, 0)
            for track in seen[number].nonzero().flatten().tolist():
                colour = COLOURS[track % len(COLOURS)]
                pen.dot(path[number, track], circle_size, colour)
                pen.line(path[begin : number + 1, track], line_width, colour)
            drawn.append(pen.on(frame))
        return io.NodeOutput(torch.stack(drawn))
