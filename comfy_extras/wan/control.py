"""Videos that follow a control video or a camera."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy_api.latest import io
from comfy_extras.declarations import (
    pair_and_latent_outputs,
)
from comfy_extras.empty_latents import empty_video
from comfy_extras.video_frames import (
    appended,
    encoded_frames,
    frames_at,
    with_values,
)
from comfy_extras.wan.common import (
    CHANNELS,
    TIME,
    beginning_with,
    empty,
    frame_mask,
    image_input,
    neutral,
    video_inputs,
    vision_input,
)


class WanFunControlToVideo(io.ComfyNode):
    """Asks the model to follow a video of depth, edges or poses."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        optional = [vision_input(), image_input("start_image"), image_input("control_video")]
        return io.Schema(
            node_id="WanFunControlToVideo",
            category="conditioning/video_models",
            inputs=[*video_inputs(), *optional],
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
        start_image: Tensor | None = None,
        clip_vision_output: Any = None,
        control_video: Tensor | None = None,
    ) -> io.NodeOutput:
        latent = empty(batch_size, width, height, length)
        cells, rows, columns = latent.shape[2:]
        nothing = neutral(CHANNELS, cells, rows, columns, batch_size)
        control, start = (
            beginning_with(images, nothing, vae, width, height, length)
            for images in (control_video, start_image)
        )
        values: dict[str, Any] = {"concat_latent_image": torch.cat([control, start], dim=1)}
        if clip_vision_output is not None:
            values["clip_vision_output"] = clip_vision_output
        return io.NodeOutput(*with_values(values, positive, negative), {"samples": latent})


class Wan22FunControlToVideo(io.ComfyNode):
    """Asks a 2.2 model to follow a video, with a picture to resemble."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Wan22FunControlToVideo",
            category="conditioning/video_models",
            inputs=[*video_inputs(), image_input("ref_image"), image_input("control_video")],
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
        ref_image: Tensor | None = None,
        start_image: Tensor | None = None,
        control_video: Tensor | None = None,
    ) -> io.NodeOutput:
        channels, space = vae.latent_channels, vae.spacial_compression_encode()
        latent = empty_video(batch_size, channels, length, height, width, TIME, space)
        cells, rows, columns = latent.shape[2:]
        nothing = neutral(channels, cells, rows, columns, batch_size)
        control, start = (
            beginning_with(images, nothing, vae, width, height, length)
            for images in (control_video, start_image)
        )
        given = []
        if start_image is not None:
            given = [slice(0, min(length, start_image.shape[0]) + TIME - 1)]
        values = {
            "concat_latent_image": torch.cat([control, start], dim=1),
            "concat_mask": frame_mask(cells, rows, columns, given),
            "concat_mask_index": channels,
        }
        pair = with_values(values, positive, negative)
        if ref_image is not None:
            reference = encoded_frames(vae, frames_at(ref_image, width, height, 1), channels)
            pair = appended({"reference_latents": [reference]}, *pair)
        return io.NodeOutput(*pair, {"samples": latent})


class WanCameraImageToVideo(io.ComfyNode):
    """Asks the model to go on from a picture with a moving camera."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        camera = io.WanCameraEmbedding.Input("camera_conditions", optional=True)
        return io.Schema(
            node_id="WanCameraImageToVideo",
            category="conditioning/video_models",
            inputs=[*video_inputs(), vision_input(), image_input("start_image"), camera],
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
        start_image: Tensor | None = None,
        clip_vision_output: Any = None,
        camera_conditions: Any = None,
    ) -> io.NodeOutput:
        latent = empty(batch_size, width, height, length)
        cells, rows, columns = latent.shape[2:]
        values: dict[str, Any] = {}
        if start_image is not None:
            nothing = neutral(CHANNELS, cells, rows, columns, batch_size)
            shown = beginning_with(start_image, nothing, vae, width, height, length)
            given = [slice(0, min(length, start_image.shape[0]) + TIME - 1)]
            mask = frame_mask(cells, rows, columns, given)
            values = {"concat_latent_image": shown, "concat_mask": mask}
        if camera_conditions is not None:
            values["camera_conditions"] = camera_conditions
        if clip_vision_output is not None:
            values["clip_vision_output"] = clip_vision_output
        return io.NodeOutput(*with_values(values, positive, negative), {"samples": latent})
