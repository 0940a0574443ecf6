"""Text, pictures and latents of Kandinsky 5."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy_api.latest import io
from comfy_extras.declarations import (
    batch_input,
    frames_input,
    pair_inputs,
    pair_outputs,
    pixels_input,
    text_input,
)
from comfy_extras.empty_latents import empty_video
from comfy_extras.extension import entrypoint_of
from comfy_extras.text_tokens import tokens_for
from comfy_extras.video_frames import cells_of, encoded_frames, frames_at, with_values
from comfy_nodes.latent_basics import VIDEO, samples_of

Latent = dict[str, Any]
CHANNELS, CELL, FRAMES_A_CELL = 16, 8, 4
# How far the mean and the deviation of a frame may move, down and up.
MEAN_RANGE, DEVIATION_RANGE = (0.3, 0.35), (0.35, 0.5)


class CLIPTextEncodeKandinsky5(io.ComfyNode):
    """Text to conditioning, with a text for each of two encoders."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CLIPTextEncodeKandinsky5",
            category="advanced/conditioning/kandinsky5",
            inputs=[io.Clip.Input("clip"), text_input("clip_l"), text_input("qwen25_7b")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, clip: Any, clip_l: str, qwen25_7b: str) -> io.NodeOutput:
        tokens = {**clip.tokenize(clip_l), "qwen25_7b": tokens_for(clip, qwen25_7b, "qwen25_7b")}
        return io.NodeOutput(clip.encode_from_tokens_scheduled(tokens))


class Kandinsky5ImageToVideo(io.ComfyNode):
    """Asks the model to go on from a picture, whose latent replaces the first frames."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Kandinsky5ImageToVideo",
            category="conditioning/video_models",
            inputs=[
                *pair_inputs(),
                io.Vae.Input("vae"),
                pixels_input("width", 768),
                pixels_input("height", 512),
                frames_input(121),
                batch_input(),
                io.Image.Input("start_image", optional=True),
            ],
            outputs=[
                *pair_outputs(),
                io.Latent.Output(display_name="latent", tooltip="An empty latent."),
                io.Latent.Output(display_name="cond_latent", tooltip="That of the picture."),
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
        start_image: Tensor | None = None,
    ) -> io.NodeOutput:
        size = (length, height, width, FRAMES_A_CELL, CELL)
        latent = empty_video(batch_size, CHANNELS, *size)
        shown: Latent = {}
        if start_image is not None:
            frames = frames_at(start_image, width, height, length)
            shown["samples"] = encoded = encoded_frames(vae, frames, CHANNELS)
            mask = torch.ones(1, 1, latent.shape[2], *encoded.shape[-2:])
            mask[:, :, : cells_of(frames.shape[0], FRAMES_A_CELL)] = 0.0
            values = {"time_dim_replace": encoded, "concat_mask": mask}
            positive, negative = with_values(values, positive, negative)
        return io.NodeOutput(positive, negative, {"samples": latent}, shown)


def like(source: Tensor, reference: Tensor) -> Tensor:
    """Frames [B, C, T, H, W] with mean and deviation moved towards those of others."""
    axes = (1, 3, 4)
    mean, deviation = source.mean(axes, keepdim=True), source.std(axes, keepdim=True)
    wanted_mean = torch.clamp(reference.mean(), mean - MEAN_RANGE[0], mean + MEAN_RANGE[1])
    wanted_deviation = torch.clamp(
        reference.std(), deviation - DEVIATION_RANGE[0], deviation + DEVIATION_RANGE[1]
    )
    return (source - mean) / (deviation + 1e-8) * wanted_deviation + wanted_mean


class NormalizeVideoLatentStart(io.ComfyNode):
    """Makes the first frames as bright and rich in contrast as those after them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="NormalizeVideoLatentStart",
            category="conditioning/video_models",
            description="Moves mean and deviation of the first frames towards those that follow.",
            inputs=[
                io.Latent.Input("latent"),
                io.Int.Input("start_frame_count", default=4, min=1, max=16384, step=1),
                io.Int.Input("reference_frame_count", default=5, min=1, max=16384, step=1),
            ],
            outputs=[io.Latent.Output(display_name="latent")],
        )

    @classmethod
    def execute(
        cls, latent: Latent, start_frame_count: int, reference_frame_count: int
    ) -> io.NodeOutput:
        samples = samples_of(latent, "latent", VIDEO)
        following = samples[:, :, start_frame_count : start_frame_count + reference_frame_count]
        if following.shape[2] == 0:
            return io.NodeOutput(latent)
        changed = samples.clone()
        changed[:, :, :start_frame_count] = like(samples[:, :, :start_frame_count], following)
        return io.NodeOutput({**latent, "samples": changed})


comfy_entrypoint = entrypoint_of(
    CLIPTextEncodeKandinsky5, Kandinsky5ImageToVideo, NormalizeVideoLatentStart
)
