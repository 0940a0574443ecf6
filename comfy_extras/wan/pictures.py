"""Videos that begin or end with given pictures, or show subjects from some."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy import latent_formats
from comfy.clip_vision import Output
from comfy_api.latest import io
from comfy_extras.declarations import (
    batch_input,
    frames_input,
    pair_and_latent_outputs,
    pixels_input,
)
from comfy_extras.empty_latents import empty_video
from comfy_extras.video_frames import (
    cells_of,
    encoded_frames,
    frames_at,
    padded_frames,
    with_values,
)
from comfy_extras.wan.common import (
    CHANNELS,
    TIME,
    WAN22_CELL,
    WAN22_CHANNELS,
    empty,
    frame_mask,
    image_input,
    neutral,
    video_inputs,
    vision_input,
)


class WanImageToVideo(io.ComfyNode):
    """Asks the model to go on from a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanImageToVideo",
            category="conditioning/video_models",
            inputs=[*video_inputs(), vision_input(), image_input("start_image")],
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
    ) -> io.NodeOutput:
        latent = empty(batch_size, width, height, length)
        values: dict[str, Any] = {}
        if start_image is not None:
            encoded = encoded_frames(
                vae, padded_frames(start_image, width, height, length), CHANNELS
            )
            mask = torch.ones(1, 1, latent.shape[2], *encoded.shape[-2:])
            mask[:, :, : cells_of(min(length, start_image.shape[0]), TIME)] = 0.0
            values = {"concat_latent_image": encoded, "concat_mask": mask}
        if clip_vision_output is not None:
            values["clip_vision_output"] = clip_vision_output
        return io.NodeOutput(*with_values(values, positive, negative), {"samples": latent})


class WanFirstLastFrameToVideo(io.ComfyNode):
    """Asks the model to lead from one picture to another."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanFirstLastFrameToVideo",
            category="conditioning/video_models",
            inputs=[
                *video_inputs(),
                vision_input("clip_vision_start_image"),
                vision_input("clip_vision_end_image"),
                image_input("start_image"),
                image_input("end_image"),
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
        start_image: Tensor | None = None,
        end_image: Tensor | None = None,
        clip_vision_start_image: Any = None,
        clip_vision_end_image: Any = None,
    ) -> io.NodeOutput:
        space = vae.spacial_compression_encode()
        latent = empty_video(batch_size, vae.latent_channels, length, height, width, TIME, space)
        cells, rows, columns = latent.shape[2:]
        video = padded_frames(start_image, width, height, length)
        given = []
        if start_image is not None:
            given.append(slice(0, min(length, start_image.shape[0]) + TIME - 1))
        if end_image is not None:
            last = frames_at(end_image[-length:], width, height)
            video[-last.shape[0] :] = last
            given.append(slice(-last.shape[0], None))
        values: dict[str, Any] = {
            "concat_latent_image": encoded_frames(vae, video, vae.latent_channels),
            "concat_mask": frame_mask(cells, rows, columns, given),
        }
        seen = [one for one in (clip_vision_start_image, clip_vision_end_image) if one is not None]
        if seen:
            values["clip_vision_output"] = joined_vision(seen)
        return io.NodeOutput(*with_values(values, positive, negative), {"samples": latent})


def joined_vision(outputs: list[Any]) -> Any:
    """What an image encoder saw of several pictures, as of one."""
    if len(outputs) == 1:
        return outputs[0]
    joined = Output()
    states = [one.penultimate_hidden_states for one in outputs]
    joined.penultimate_hidden_states = torch.cat(states, dim=-2)
    return joined


class WanFunInpaintToVideo(io.ComfyNode):
    """As from one picture to another, with one description of both."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        optional = [vision_input(), image_input("start_image"), image_input("end_image")]
        return io.Schema(
            node_id="WanFunInpaintToVideo",
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
        end_image: Tensor | None = None,
        clip_vision_output: Any = None,
    ) -> io.NodeOutput:
        return WanFirstLastFrameToVideo.execute(
            positive,
            negative,
            vae,
            width,
            height,
            length,
            batch_size,
            start_image=start_image,
            end_image=end_image,
            clip_vision_start_image=clip_vision_output,
        )


class WanPhantomSubjectToVideo(io.ComfyNode):
    """Asks the model for a video with subjects from pictures."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanPhantomSubjectToVideo",
            category="conditioning/video_models",
            inputs=[*video_inputs(), image_input("images")],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative_text"),
                io.Conditioning.Output(display_name="negative_img_text"),
                io.Latent.Output(display_name="latent"),
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
        images: Tensor | None = None,
    ) -> io.NodeOutput:
        latent = {"samples": empty(batch_size, width, height, length)}
        if images is None:
            return io.NodeOutput(positive, negative, negative, latent)
        frames = frames_at(images, width, height, length)
        shown = torch.cat(
            [encoded_frames(vae, frame, CHANNELS) for frame in frames.split(1)], dim=2
        )
        nothing = latent_formats.Wan21().process_out(torch.zeros_like(shown))
        with_subjects = with_values({"time_dim_concat": shown}, positive, negative)
        (without,) = with_values({"time_dim_concat": nothing}, negative)
        return io.NodeOutput(*with_subjects, without, latent)


class Wan22ImageToVideoLatent(io.ComfyNode):
    """A latent of the small 2.2 model that begins with given frames."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Wan22ImageToVideoLatent",
            category="conditioning/inpaint",
            inputs=[
                io.Vae.Input("vae"),
                pixels_input("width", 1280, 32, 32),
                pixels_input("height", 704, 32, 32),
                frames_input(49),
                batch_input(),
                image_input("start_image"),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(
        cls,
        vae: Any,
        width: int,
        height: int,
        length: int,
        batch_size: int,
        start_image: Tensor | None = None,
    ) -> io.NodeOutput:
        size = (length, height, width, TIME, WAN22_CELL)
        if start_image is None:
            return io.NodeOutput({"samples": empty_video(batch_size, WAN22_CHANNELS, *size)})
        latent = empty_video(1, WAN22_CHANNELS, *size)
        mask = torch.ones(1, 1, *latent.shape[2:])
        encoded = encoded_frames(vae, frames_at(start_image, width, height, length), WAN22_CHANNELS)
        latent = neutral(WAN22_CHANNELS, *latent.shape[2:])
        latent[:, :, : encoded.shape[2]] = encoded
        mask[:, :, : encoded.shape[2]] = 0.0
        return io.NodeOutput(
            {
                "samples": latent.repeat(batch_size, 1, 1, 1, 1),
                "noise_mask": mask.repeat(batch_size, 1, 1, 1, 1),
            }
        )
