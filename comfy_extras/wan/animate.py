"""Wan Animate: a person moves as one in a video does, or takes that one's place in it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from comfy import resize
from comfy_api.latest import io
from comfy_extras.declarations import pair_and_latent_outputs
from comfy_extras.video_frames import (
    GREY,
    Conditioning,
    blank,
    cells_of,
    encoded_frames,
    with_values,
)
from comfy_extras.wan.common import CELL, CHANNELS, TIME, image_input, video_inputs, vision_input
from comfy_nodes.picture_basics import masks_of

FACE_SIDE = 512  # of the pictures of faces in pixels


def resized(frames: Tensor, width: int, height: int) -> Tensor:
    """Frames [T, H, W, C] in three channels at a size, cropped to fit and averaged."""
    pixels = frames[..., :3].movedim(-1, 1)
    return resize.common_upscale(pixels, width, height, "area", "center").movedim(1, -1)


@dataclass(frozen=True)
class Part:
    """The part of the videos that one run makes.

    Attributes:
        offset: Frames of the given videos that come before it.
        begun: Frames at its beginning that an earlier run made.
    """

    width: int
    height: int
    length: int
    offset: int
    begun: int

    def of(self, frames: Tensor | None) -> Tensor | None:
        """What a video shows of this part; None if it ends before."""
        if frames is None or frames.shape[0] <= self.offset:
            return None
        return frames[self.offset :][: self.length]


def pose_latent(vae: Any, pose_video: Tensor | None, part: Part) -> Tensor | None:
    """The latent of the poses, the last of which stands for those that are missing."""
    poses = part.of(pose_video)
    if poses is None:
        return None
    sized = resized(poses, part.width, part.height)
    missing = part.length - sized.shape[0]
    return encoded_frames(vae, torch.cat([sized, sized[-1:].repeat(missing, 1, 1, 1)]), CHANNELS)


def faces(face_video: Tensor | None, part: Part) -> Tensor | None:
    """Pictures of the face [1, 3, T, side, side] in -1..1."""
    shown = part.of(face_video)
    if shown is None:
        return None
    return (resized(shown, FACE_SIDE, FACE_SIDE) * 2.0 - 1.0).movedim(-1, 0)[None]


def surroundings(earlier: Tensor | None, background: Tensor | None, part: Part) -> Tensor:
    """The video [T, H, W, 3] that the model fills: what was made before, then the background."""
    video = torch.full((part.length, part.height, part.width, 3), GREY)
    if earlier is not None:
        video[: part.begun] = resized(earlier, part.width, part.height)
    behind, kept = part.of(background), begun_frames(part)
    if behind is not None and behind.shape[0] > kept:
        video[kept : behind.shape[0]] = resized(behind[kept:], part.width, part.height)
    return video


def begun_frames(part: Part) -> int:
    """Frames that whole cells of what was made before hold."""
    return max(cells_of(part.begun, TIME) * TIME - TIME + 1, 0)


def fill_mask(character: Tensor | None, part: Part, rows: int, columns: int) -> Tensor:
    """[1, 4, T, H, W]: 1 where the model paints, 0 where the video stays as it is.

    Args:
        character: [T, H, W] or one for all frames; 1 where the person is.
    """
    cells = cells_of(part.length, TIME)
    mask = torch.ones(cells * TIME, rows, columns)
    if part.begun:
        mask[: cells_of(part.begun, TIME) * TIME] = 0.0
    if character is not None:
        character = masks_of(character)
        one = character.shape[0] == 1
        shown = character.expand(part.length, -1, -1) if one else part.of(character)
        kept = begun_frames(part)
        if shown is not None and shown.shape[0] > kept:
            size = (columns, rows)
            sized = resize.common_upscale(shown[kept:, None], *size, "nearest-exact", "center")
            mask[kept : shown.shape[0]] = sized[:, 0]
    return mask.reshape(1, cells, TIME, rows, columns).transpose(1, 2)


class WanAnimateToVideo(io.ComfyNode):
    """Gives an Animate model the person, the poses and faces to take over, and the surroundings."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        offset = "Frames of all given videos that earlier runs have made already."
        return io.Schema(
            node_id="WanAnimateToVideo",
            category="conditioning/video_models",
            is_experimental=True,
            inputs=[
                *video_inputs(77),
                io.Int.Input("continue_motion_max_frames", default=5, min=1, max=16384, step=4),
                io.Int.Input(
                    "video_frame_offset", default=0, min=0, max=16384, step=1, tooltip=offset
                ),
                vision_input(),
                *(
                    image_input(id)
                    for id in ("reference_image", "face_video", "pose_video", "background_video")
                ),
                io.Mask.Input("character_mask", optional=True),
                image_input("continue_motion"),
            ],
            outputs=[
                *pair_and_latent_outputs(),
                io.Int.Output(display_name="trim_latent"),
                io.Int.Output(display_name="trim_image"),
                io.Int.Output(display_name="video_frame_offset"),
            ],
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
        continue_motion_max_frames: int,
        video_frame_offset: int,
        reference_image: Tensor | None = None,
        clip_vision_output: Any = None,
        face_video: Tensor | None = None,
        pose_video: Tensor | None = None,
        continue_motion: Tensor | None = None,
        background_video: Tensor | None = None,
        character_mask: Tensor | None = None,
    ) -> io.NodeOutput:
        part, earlier = Part(width, height, length, video_frame_offset, 0), None
        if continue_motion is not None:
            earlier = continue_motion[-continue_motion_max_frames:]
            offset = max(0, video_frame_offset - earlier.shape[0])
            earlier = earlier[-length:]
            part = replace(part, offset=offset, begun=earlier.shape[0])
        person = torch.zeros(1, height, width, 3)
        if reference_image is not None:
            person = resized(reference_image[:length], width, height)
        person = encoded_frames(vae, person, CHANNELS)
        video = encoded_frames(vae, surroundings(earlier, background_video, part), CHANNELS)
        rows, columns = person.shape[-2:]
        known = torch.zeros(1, TIME, person.shape[2], rows, columns)
        values: dict[str, Any] = {
            "concat_latent_image": torch.cat([person, video], dim=2),
            "concat_mask": torch.cat([known, fill_mask(character_mask, part, rows, columns)], 2),
        }
        if clip_vision_output is not None:
            values["clip_vision_output"] = clip_vision_output
        poses = pose_latent(vae, pose_video, part)
        if poses is not None:
            values["pose_video_latent"] = poses
        pair = with_faces(face_video, part, with_values(values, positive, negative))
        trim = person.shape[2]
        cells = cells_of(length, TIME) + trim
        samples = blank(batch_size, CHANNELS, cells, height // CELL, width // CELL)
        return io.NodeOutput(
            *pair, {"samples": samples}, trim, begun_frames(part), part.offset + length
        )


def with_faces(
    face_video: Tensor | None, part: Part, pair: list[Conditioning]
) -> list[Conditioning]:
    """The conditioning to follow with faces, and the one to avoid with black ones."""
    shown = faces(face_video, part)
    if shown is None:
        return pair
    values = (shown, torch.full_like(shown, -1.0))
    return [with_values({"face_video_pixels": v}, one)[0] for v, one in zip(values, pair)]
