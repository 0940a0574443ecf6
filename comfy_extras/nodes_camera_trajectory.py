"""The way of a camera, for Wan's camera models.

A camera's pose turns points of the scene into its own axes (x right, y down, z ahead). The model
is given the ray through every pixel in Plücker coordinates, as seen from the first frame's camera.

Source: He et al. 2024, https://arxiv.org/abs/2404.02101, section 3.2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from comfy.devices import placement
from comfy_api.latest import io
from comfy_extras.declarations import frames_input, pixels_input
from comfy_extras.extension import entrypoint_of
from comfy_extras.video_frames import cells_of
from comfy_nodes.latent_basics import empty_samples

TIME = 4  # frames that share a latent cell
MOST_TURN, MOST_SHIFT = math.pi / 3, 1.5  # over the whole video, at speed 1
PICTURE_RATIO = 1280 / 720  # of the pictures that the focal lengths were measured on

# Axis-wise turns and shifts of the scene in the camera's axes.
WAYS: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]] = {
    "Static": ((0, 0, 0), (0, 0, 0)),
    "Pan Up": ((0, 0, 0), (0, -1, 0)),
    "Pan Down": ((0, 0, 0), (0, 1, 0)),
    "Pan Left": ((0, 0, 0), (-1, 0, 0)),
    "Pan Right": ((0, 0, 0), (1, 0, 0)),
    "Zoom In": ((0, 0, 0), (0, 0, 2)),
    "Zoom Out": ((0, 0, 0), (0, 0, -2)),
    "Anti Clockwise (ACW)": ((0, 0, -1), (0, 0, 0)),
    "ClockWise (CW)": ((0, 0, 1), (0, 0, 0)),
}


def turned(angles: Tensor) -> Tensor:
    """Rotations [T, 3, 3] by angles [T, 3] about x, then y, then z."""
    turns = []
    for axis in range(3):
        first, second = [other for other in range(3) if other != axis]
        if axis == 1:
            first, second = second, first  # so that each axis turns the right-handed way
        turn = torch.eye(3, dtype=angles.dtype).repeat(angles.shape[0], 1, 1)
        cos, sin = angles[:, axis].cos(), angles[:, axis].sin()
        turn[:, first, first], turn[:, first, second] = cos, -sin
        turn[:, second, first], turn[:, second, second] = sin, cos
        turns.append(turn)
    return turns[2] @ turns[1] @ turns[0]


def poses(way: str, speed: float, length: int) -> Tensor:
    """Where each frame's camera is and looks [T, 4, 4], from the first frame's camera."""
    angle, shift = (torch.tensor(part, dtype=torch.float64) for part in WAYS[way])
    share = torch.arange(length, dtype=torch.float64)[:, None] / length * speed
    into_camera = torch.eye(4, dtype=torch.float64).repeat(length, 1, 1)
    into_camera[:, :3, :3] = turned(share * MOST_TURN * angle)
    into_camera[:, :3, 3] = share * MOST_SHIFT * shift
    return into_camera[0] @ torch.linalg.inv(into_camera)


def pixel_directions(focal: Tensor, centre: Tensor, height: int, width: int) -> Tensor:
    """Unit vectors [3, H, W] from the camera through the middle of each pixel, in its axes.

    Args:
        focal, centre: Focal lengths and optical centre (x, y) in pixels.
    """
    x = (torch.arange(width) + 0.5 - centre[0]) / focal[0]
    y = (torch.arange(height) + 0.5 - centre[1]) / focal[1]
    down, across = torch.meshgrid(y, x, indexing="ij")
    ahead = torch.stack([across, down, torch.ones_like(down)])
    return (ahead / ahead.norm(dim=0)).float()


def plucker_rays(camera: Tensor, ahead: Tensor) -> Tensor:
    """Moment and direction [6, H, W] of the rays of a camera [4, 4] along directions [3, H, W]."""
    direction = torch.einsum("ij,jhw->ihw", camera[:3, :3], ahead)
    origin = camera[:3, 3, None, None].expand_as(direction)
    return torch.cat([torch.linalg.cross(origin, direction, dim=0), direction])


def camera_latent(cameras: Tensor, ahead: Tensor) -> Tensor:
    """Rays as 24 channels for each cell in time [1, 24, T', H, W].

    The first frame fills a cell alone; frames beyond whole cells are left out.
    """
    cells = cells_of(cameras.shape[0], TIME)
    shape = (1, 6, TIME, cells, *ahead.shape[1:])
    latent = empty_samples(shape, placement.intermediate_device())
    for place in range(cells * TIME):
        cell, slot = divmod(place, TIME)
        latent[0, :, slot, cell] = plucker_rays(cameras[max(place - TIME + 1, 0)], ahead)
    return latent.flatten(1, 2)


class WanCameraEmbedding(io.ComfyNode):
    """The way of a camera, by name."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        def share(id: str, step: float) -> io.Float.Input:
            return io.Float.Input(id, default=0.5, min=0, max=1, step=step, optional=True)

        return io.Schema(
            node_id="WanCameraEmbedding",
            category="camera",
            inputs=[
                io.Combo.Input("camera_pose", options=list(WAYS), default="Static"),
                pixels_input("width", 832),
                pixels_input("height", 480),
                frames_input(81),
                io.Float.Input("speed", default=1.0, min=0, max=10.0, step=0.1, optional=True),
                share("fx", 0.000000001),
                share("fy", 0.000000001),
                share("cx", 0.01),
                share("cy", 0.01),
            ],
            outputs=[
                io.WanCameraEmbedding.Output(display_name="camera_embedding"),
                io.Int.Output(display_name="width"),
                io.Int.Output(display_name="height"),
                io.Int.Output(display_name="length"),
            ],
        )

    @classmethod
    def execute(
        cls,
        camera_pose: str,
        width: int,
        height: int,
        length: int,
        speed: float = 1.0,
        fx: float = 0.5,
        fy: float = 0.5,
        cx: float = 0.5,
        cy: float = 0.5,
    ) -> io.NodeOutput:
        for id, value in (("fx", fx), ("fy", fy)):
            if value <= 0:
                raise ValueError(
                    f"{id}: expected a focal length above 0, as a share of the side, found {value}"
                )
        # The focal lengths hold for pictures of the measured shape, cut to this one.
        ratio = width / height
        if ratio < PICTURE_RATIO:
            fx = fx * PICTURE_RATIO / ratio
        else:
            fy = fy * ratio / PICTURE_RATIO
        size = torch.tensor([width, height], dtype=torch.float64)
        focal, centre = torch.tensor([fx, fy]) * size, torch.tensor([cx, cy]) * size
        ahead = pixel_directions(focal, centre, height, width)
        cameras = poses(camera_pose, speed, length).float()
        return io.NodeOutput(camera_latent(cameras, ahead), width, height, length)


comfy_entrypoint = entrypoint_of(WanCameraEmbedding)
