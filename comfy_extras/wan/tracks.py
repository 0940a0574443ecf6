"""Videos whose parts follow drawn tracks: the features of the first frame are moved along them.

Source: Wang et al. 2025, https://arxiv.org/abs/2505.22944.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from comfy import latent_formats, resize
from comfy_api.latest import io
from comfy_extras.declarations import pair_and_latent_outputs, pair_inputs
from comfy_extras.video_frames import GREY, encoded_frames, frames_at, with_values
from comfy_extras.wan.common import CHANNELS, TIME, empty, size_inputs, vision_input
from comfy_extras.wan.pictures import WanImageToVideo
from comfy_extras.wan.track_text import EXAMPLE, Track, read_json, read_track

POINTS = 121  # of a track as the model was taught: a first one, then 24 a second


def parsed_tracks(text: str) -> list[list[Track]]:
    """Tracks [videos][tracks]; a list of points, or of tracks, is of one video.

    Raises:
        ValueError: The text is no JSON list of these.
    """
    given = read_json(text, "tracks")
    first = given[0] if isinstance(given, list) and given else None
    if isinstance(first, dict):
        given = [[given]]
    elif isinstance(first, list) and first and isinstance(first[0], dict):
        given = [given]
    if not isinstance(given, list) or not all(isinstance(video, list) for video in given):
        raise ValueError(
            f"tracks: expected a list of tracks such as {EXAMPLE}, found {text[:80]!r}"
        )
    return [[read_track(track, "tracks") for track in video] for video in given]


def placed(tracks: list[Track], width: int, height: int, frames: int) -> tuple[Tensor, Tensor]:
    """Where tracks are at each frame [frames, N, 2], and whether they are there [frames, N, 1].

    Places are measured from the middle, in halves of the shorter side. Points beyond the taught
    number are left out; where a track is shorter, it is not seen.
    """
    points, seen = torch.zeros(POINTS, len(tracks), 2), torch.zeros(POINTS, len(tracks), 1)
    for number, track in enumerate(tracks):
        count = min(len(track), POINTS)
        points[:count, number] = torch.tensor(track[:count]).reshape(count, 2)
        seen[:count, number] = 1.0
    middle = torch.tensor([width, height]) / 2
    points = (points - middle) / min(width, height) * 2
    # The points after the first are spread over the frames after the first: each is repeated, and
    # every so many of the repeated ones is taken.
    moves, rest = POINTS - 1, frames - 1
    share = math.gcd(moves, rest)
    step = moves // share
    index = torch.arange(moves).repeat_interleave(rest // share)[min(1, step - 1) :: step] + 1
    index = torch.cat([torch.zeros(1, dtype=torch.long), index])
    return points[index], seen[index]


@dataclass(frozen=True)
class Reach:
    """How far a track's features reach: the more, the narrower; and how many mix at a place."""

    temperature: float
    topk: int


def moved_features(
    latent: Tensor, points: Tensor, seen: Tensor, reach: Reach
) -> tuple[Tensor, Tensor]:
    """A latent [C, T, H, W] with the first frame's features along tracks.

    Args:
        points, seen: See `placed`.
    Returns:
        The latent, and how much of each place was moved there [T, H, W], 1 in the first cell.
    """
    cells, rows, columns = latent.shape[1:]
    extent = torch.tensor([columns, rows]) / min(rows, columns)  # half sides
    first = (points[:1] / extent).clamp(-1, 1)
    features = functional.grid_sample(
        latent[None, :, 0], first[None].to(latent), padding_mode="zeros", align_corners=False
    )[0, :, 0].T  # [N, C]
    later = slice(1, 1 + (cells - 1) * TIME)
    shown = seen[later].unflatten(0, (cells - 1, TIME))
    count = shown.sum(dim=1)
    means = (points[later].unflatten(0, (cells - 1, TIME)) * shown).sum(dim=1) / (count + 1e-5)
    y, x = (
        torch.linspace(-float(half), float(half), size)
        for half, size in ((extent[1], rows), (extent[0], columns))
    )
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], dim=-1)
    mixed, weights = [latent[:, :1]], [torch.ones(1, rows, columns)]
    for cell in range(cells - 1):  # one after another, for the distances take the most memory
        distance = (means[cell] - grid[:, :, None]).square().sum(dim=-1)  # [H, W, N]
        near = torch.exp(-distance * reach.temperature) * count[cell, :, 0].clamp(0, 1)
        weight, track = near.topk(min(reach.topk, near.shape[-1]), dim=-1)
        moved = (features[track] * weight[..., None].to(features)).sum(dim=2).movedim(-1, 0)
        total = weight.sum(dim=-1)
        kept = latent[:, cell + 1] * (1 - total.clamp(0, 1)).to(latent)
        mixed.append((moved + kept)[:, None])
        weights.append(total[None])
    return torch.cat(mixed, dim=1), torch.cat(weights)


class WanTrackToVideo(io.ComfyNode):
    """Asks the model to go on from a picture whose parts follow tracks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanTrackToVideo",
            category="conditioning/video_models",
            inputs=[
                *pair_inputs(),
                io.Vae.Input("vae"),
                io.String.Input("tracks", multiline=True, default="[]"),
                *size_inputs(),
                io.Float.Input("temperature", default=220.0, min=1.0, max=1000.0, step=0.1),
                io.Int.Input("topk", default=2, min=1, max=10),
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
        tracks: str,
        width: int,
        height: int,
        length: int,
        batch_size: int,
        temperature: float,
        topk: int,
        start_image: Tensor | None = None,
        clip_vision_output: Any = None,
    ) -> io.NodeOutput:
        videos = [video for video in parsed_tracks(tracks) if video]
        if not videos:
            return WanImageToVideo.execute(
                positive, negative, vae, width, height, length, batch_size, start_image,
                clip_vision_output,
            )  # fmt: skip
        latent = empty(batch_size, width, height, length)
        values: dict[str, Any] = {}
        if start_image is not None:
            frames = resize.resize_to_batch_size(
                frames_at(start_image, width, height, batch_size), batch_size
            )
            chosen = resize.resize_to_batch_size(torch.arange(len(videos)), batch_size)
            made = []
            for frame, number in zip(frames, chosen.tolist()):
                places = placed(videos[number], width, height, length)
                begun = begun_video(vae, frame, length)
                made.append(moved_features(begun, *places, Reach(temperature, topk)))
            shown = latent_formats.Wan21().process_out(torch.stack([one for one, _ in made]))
            mask = 1.0 - torch.stack([weight for _, weight in made])
            mask = mask[:, None].expand(-1, TIME, -1, -1, -1)
            values = {"concat_latent_image": shown, "concat_mask": mask}
        if clip_vision_output is not None:
            values["clip_vision_output"] = clip_vision_output
        return io.NodeOutput(*with_values(values, positive, negative), {"samples": latent})


def begun_video(vae: Any, frame: Tensor, length: int) -> Tensor:
    """The latent of a picture [H, W, 3] followed by grey frames, in the network's space."""
    video = torch.full((length, *frame.shape), GREY)
    video[0] = frame
    return latent_formats.Wan21().process_in(encoded_frames(vae, video, CHANNELS))[0]
