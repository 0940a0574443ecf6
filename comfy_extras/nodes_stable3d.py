"""Conditioning of models that show an object from other sides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comfy import resize
from comfy_api.latest import io
from comfy_extras.declarations import batch_input, pair_and_latent_outputs, pixels_input
from comfy_extras.empty_latents import empty_image
from comfy_extras.extension import entrypoint_of
from comfy_nodes.picture_basics import check_count

CATEGORY = "conditioning/3d_models"
CELL, CHANNELS = 8, 4
FULL_TURN = 360.0


def angle_input(id: str, limit: float = 180.0) -> io.Float.Input:
    """An angle in degrees."""
    return io.Float.Input(id, default=0.0, min=-limit, max=limit, step=0.1, round=False)


def picture_inputs(side: int) -> list[io.Input]:
    """What every one of these models is given."""
    return [
        io.ClipVision.Input("clip_vision"),
        io.Image.Input("init_image"),
        io.Vae.Input("vae"),
        pixels_input("width", side, step=8),
        pixels_input("height", side, step=8),
    ]


def encoded(
    clip_vision: Any, vae: Any, picture: Tensor, width: int, height: int, views: int
) -> tuple[Tensor, Tensor]:
    """Pictures as the image encoder sees them [B, 1, D], and their latents: one or one each."""
    check_count(picture.shape[0], views, "picture", "init_image", "batch_size or video_frames")
    embeds = clip_vision.encode_image(picture).image_embeds.unsqueeze(1)
    pixels = resize.common_upscale(picture.movedim(-1, 1), width, height, "bilinear", "center")
    return embeds, vae.encode(pixels.movedim(1, -1)[..., :3])


def camera_embeddings(elevation: float, azimuth: float) -> Tensor:
    """Where the camera stands [1, 1, 4], relative to the given picture.

    Source: Liu et al. 2023, https://arxiv.org/abs/2303.11328: difference of polar angles, sine and
    cosine of that of azimuths, and the given camera's own polar angle, here the horizon.
    """
    height, turn = torch.deg2rad(torch.tensor([elevation, azimuth]))
    horizon = torch.deg2rad(torch.tensor(90.0))
    return torch.stack([-height, turn.sin(), turn.cos(), horizon]).reshape(1, 1, 4)


class StableZero123_Conditioning(io.ComfyNode):
    """Asks for an object seen from another side."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="StableZero123_Conditioning",
            category=CATEGORY,
            inputs=[
                *picture_inputs(256),
                batch_input(),
                angle_input("elevation"),
                angle_input("azimuth"),
            ],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def execute(
        cls,
        clip_vision: Any,
        init_image: Tensor,
        vae: Any,
        width: int,
        height: int,
        batch_size: int,
        elevation: float,
        azimuth: float,
    ) -> io.NodeOutput:
        embeds, latent = encoded(clip_vision, vae, init_image, width, height, batch_size)
        camera = camera_embeddings(elevation, azimuth).to(embeds).repeat(embeds.shape[0], 1, 1)
        positive = [[torch.cat([embeds, camera], dim=-1), {"concat_latent_image": latent}]]
        nothing = {"concat_latent_image": torch.zeros_like(latent)}
        samples = empty_image(batch_size, CHANNELS, height, width, CELL)
        return io.NodeOutput(positive, [[torch.zeros_like(embeds), nothing]], {"samples": samples})

    encode = execute


class StableZero123_Conditioning_Batched(io.ComfyNode):
    """Asks for an object seen from several sides, the camera moving on by equal angles."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="StableZero123_Conditioning_Batched",
            category=CATEGORY,
            inputs=[
                *picture_inputs(256),
                batch_input(),
                angle_input("elevation"),
                angle_input("azimuth"),
                angle_input("elevation_batch_increment"),
                angle_input("azimuth_batch_increment"),
            ],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def execute(
        cls,
        clip_vision: Any,
        init_image: Tensor,
        vae: Any,
        width: int,
        height: int,
        batch_size: int,
        elevation: float,
        azimuth: float,
        elevation_batch_increment: float,
        azimuth_batch_increment: float,
    ) -> io.NodeOutput:
        embeds, latent = encoded(clip_vision, vae, init_image, width, height, batch_size)
        cameras = torch.cat(
            [
                camera_embeddings(
                    elevation + number * elevation_batch_increment,
                    azimuth + number * azimuth_batch_increment,
                )
                for number in range(batch_size)
            ]
        ).to(embeds)
        states = torch.cat([embeds.expand(batch_size, -1, -1), cameras], dim=-1)
        nothing = {"concat_latent_image": torch.zeros_like(latent)}
        samples = empty_image(batch_size, CHANNELS, height, width, CELL)
        return io.NodeOutput(
            [[states, {"concat_latent_image": latent}]],
            [[torch.zeros_like(embeds), nothing]],
            # One noise for all views, so that they show the same object.
            {"samples": samples, "batch_index": [0] * batch_size},
        )

    encode = execute


class SV3D_Conditioning(io.ComfyNode):
    """Asks for a turn around an object as a video."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SV3D_Conditioning",
            category=CATEGORY,
            inputs=[
                *picture_inputs(576),
                io.Int.Input("video_frames", default=21, min=1, max=4096),
                angle_input("elevation", 90.0),
            ],
            outputs=pair_and_latent_outputs(),
        )

    @classmethod
    def execute(
        cls,
        clip_vision: Any,
        init_image: Tensor,
        vae: Any,
        width: int,
        height: int,
        video_frames: int,
        elevation: float,
    ) -> io.NodeOutput:
        embeds, latent = encoded(clip_vision, vae, init_image, width, height, video_frames)
        step = FULL_TURN / (max(video_frames, 2) - 1)
        views = {
            "elevation": [elevation] * video_frames,
            "azimuth": [number * step for number in range(video_frames)],
        }
        nothing = {"concat_latent_image": torch.zeros_like(latent), **views}
        samples = empty_image(video_frames, CHANNELS, height, width, CELL)
        return io.NodeOutput(
            [[embeds, {"concat_latent_image": latent, **views}]],
            [[torch.zeros_like(embeds), nothing]],
            {"samples": samples},
        )

    encode = execute


comfy_entrypoint = entrypoint_of(
    StableZero123_Conditioning, StableZero123_Conditioning_Batched, SV3D_Conditioning
)
