"""Latents of Cosmos, empty or with given first and last frames."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy import latent_formats
from comfy_api.latest import io
from comfy_extras.declarations import batch_input, frames_input, pixels_input
from comfy_extras.empty_latents import empty_video
from comfy_extras.extension import entrypoint_of
from comfy_extras.video_frames import cells_of, encoded_frames, frames_at, padded_frames

CHANNELS, CELL = 16, 8
FRAMES_A_CELL, PREDICT2_FRAMES_A_CELL = 8, 4


def latent_of_frames(
    vae: Any, images: Tensor, width: int, height: int, length: int, time: int, padding: int
) -> Tensor:
    """Latent of some frames, encoded together with grey ones, so that they are not the end.

    Args:
        time: Frames that share a latent cell.
        padding: Cells of grey frames behind them.
    """
    frames = frames_at(images, width, height, length)
    cells = cells_of(frames.shape[0], time)
    whole = min(length, (cells - 1 + padding) * time + 1)
    video = padded_frames(frames, width, height, whole)
    return encoded_frames(vae, video, CHANNELS)[:, :, :cells]


def with_frames(
    vae: Any,
    size: tuple[int, int, int],
    time: int,
    start_image: Tensor | None,
    end_image: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A latent [1, C, T, H, W] with given first and last frames, and its noise mask.

    Args:
        size: Width, height and number of frames.
        time: Frames that share a latent cell.
    """
    width, height, length = size
    latent = empty_video(1, CHANNELS, length, height, width, time, CELL)
    mask = torch.ones(1, 1, *latent.shape[2:])
    if start_image is not None:
        first = latent_of_frames(vae, start_image, *size, time, padding=1)
        latent[:, :, : first.shape[2]] = first
        mask[:, :, : first.shape[2]] = 0.0
    if end_image is not None:
        last = latent_of_frames(vae, end_image, *size, time, padding=0)
        latent[:, :, -last.shape[2] :] = last
        mask[:, :, -last.shape[2] :] = 0.0
    return latent, mask


def repeated(samples: Tensor, mask: Tensor, count: int) -> dict[str, Tensor]:
    """The latent repeated to a batch."""
    return {
        "samples": samples.repeat(count, 1, 1, 1, 1),
        "noise_mask": mask.repeat(count, 1, 1, 1, 1),
    }


class EmptyCosmosLatentVideo(io.ComfyNode):
    """An empty latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyCosmosLatentVideo",
            category="latent/video",
            inputs=[
                pixels_input("width", 1280),
                pixels_input("height", 704),
                frames_input(121, step=8),
                batch_input(),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, width: int, height: int, length: int, batch_size: int = 1) -> io.NodeOutput:
        size = (length, height, width, FRAMES_A_CELL, CELL)
        return io.NodeOutput({"samples": empty_video(batch_size, CHANNELS, *size)})


class CosmosImageToVideoLatent(io.ComfyNode):
    """A latent with given first and last frames."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CosmosImageToVideoLatent",
            category="conditioning/inpaint",
            inputs=[
                io.Vae.Input("vae"),
                pixels_input("width", 1280),
                pixels_input("height", 704),
                frames_input(121, step=8),
                batch_input(),
                io.Image.Input("start_image", optional=True),
                io.Image.Input("end_image", optional=True),
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
        end_image: Tensor | None = None,
    ) -> io.NodeOutput:
        if start_image is None and end_image is None:
            return EmptyCosmosLatentVideo.execute(width, height, length, batch_size)
        size = (width, height, length)
        latent, mask = with_frames(vae, size, FRAMES_A_CELL, start_image, end_image)
        return io.NodeOutput(repeated(latent, mask, batch_size))


class CosmosPredict2ImageToVideoLatent(io.ComfyNode):
    """A latent of Predict 2 with given first and last frames."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CosmosPredict2ImageToVideoLatent",
            category="conditioning/inpaint",
            inputs=[
                io.Vae.Input("vae"),
                pixels_input("width", 848),
                pixels_input("height", 480),
                frames_input(93),
                batch_input(),
                io.Image.Input("start_image", optional=True),
                io.Image.Input("end_image", optional=True),
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
        end_image: Tensor | None = None,
    ) -> io.NodeOutput:
        if start_image is None and end_image is None:
            size = (length, height, width, PREDICT2_FRAMES_A_CELL, CELL)
            return io.NodeOutput({"samples": empty_video(batch_size, CHANNELS, *size)})
        latent, mask = with_frames(
            vae, (width, height, length), PREDICT2_FRAMES_A_CELL, start_image, end_image
        )
        # What is not given is to be zero in the network's space, not in the autoencoder's.
        neutral = latent_formats.Wan21().process_out(latent)
        return io.NodeOutput(repeated(neutral * mask + latent * (1 - mask), mask, batch_size))


comfy_entrypoint = entrypoint_of(
    EmptyCosmosLatentVideo, CosmosImageToVideoLatent, CosmosPredict2ImageToVideoLatent
)
