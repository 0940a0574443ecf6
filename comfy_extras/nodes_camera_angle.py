"""A node that chooses from where a subject is seen, for 3D views and in words."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

from comfy_api.latest import io
from comfy_extras.extension import entrypoint_of

AROUND = (
    "front view", "front-right quarter view", "right side view", "back-right quarter view",
    "back view", "back-left quarter view", "left side view", "front-left quarter view",
)  # fmt: skip
ABOVE = ("low-angle shot", "eye-level shot", "elevated shot", "high-angle shot")
ABOVE_FROM = (-15, 15, 45)  # degrees where the next one begins
NEAR = ("wide shot", "medium shot", "close-up")
NEAR_FROM = (2, 6)  # of the zoom on the node

LOWEST, HIGHEST = -30, 60  # degrees
LARGEST_ZOOM = 10.0
LARGEST_FACTOR = 1.875  # zoom of the camera at the largest on the node
DISTANCE = 6.0  # from camera to subject, which stands in the origin
FIELD_OF_VIEW = 35  # degrees


def words_of(horizontal: float, vertical: float, zoom: float) -> str:
    """The view in words."""
    sector = math.floor((horizontal % 360 + 22.5) / 45) % len(AROUND)
    height = ABOVE[bisect_right(ABOVE_FROM, vertical)]
    return f"{AROUND[sector]} {height} {NEAR[bisect_right(NEAR_FROM, zoom)]}"


def camera_at(horizontal: float, vertical: float, zoom: float) -> dict[str, Any]:
    """The camera with that view; y points up, z to the front, x to the right side."""
    yaw, pitch = math.radians(horizontal), math.radians(vertical)
    level = DISTANCE * math.cos(pitch)
    return {
        "position": {
            "x": level * math.sin(yaw), "y": DISTANCE * math.sin(pitch), "z": level * math.cos(yaw),
        },
        "target": {"x": 0.0, "y": 0.0, "z": 0.0},
        "zoom": 1.0 + (LARGEST_FACTOR - 1.0) * zoom / LARGEST_ZOOM,
        "cameraType": "perspective",
        "fov": FIELD_OF_VIEW,
    }  # fmt: skip


class CameraAngle(io.ComfyNode):
    """From where a subject is seen."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CameraAngle",
            display_name="Compose Camera Angle Prompt",
            category="3d",
            description="A view of a subject, as a camera for 3D nodes and in words.",
            inputs=[
                io.Int.Input(
                    "horizontal_angle", default=0, min=0, max=360,
                    tooltip="Degrees around the subject: 0 front, 90 right side, 180 back.",
                ),
                io.Int.Input(
                    "vertical_angle", default=0, min=LOWEST, max=HIGHEST,
                    tooltip="Degrees above the subject; below 0 the camera looks up.",
                ),
                io.Float.Input(
                    "zoom", default=5.0, min=0.0, max=LARGEST_ZOOM, step=0.1,
                    tooltip="0 is a wide shot, 10 a close-up.",
                ),
                io.Image.Input("image", optional=True, tooltip="Shown on the subject's front."),
                io.Custom("CAMERA_ANGLE_VIEW").Input(
                    "view", optional=True, extra_dict={"socketless": True}
                ),
            ],
            outputs=[
                io.Load3DCamera.Output(display_name="camera_info"),
                io.String.Output(display_name="prompt"),
            ],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        horizontal_angle: int,
        vertical_angle: int,
        zoom: float,
        image: Any = None,  # noqa: ARG003 - the editor shows it
        view: Any = None,  # noqa: ARG003
    ) -> io.NodeOutput:
        angles = horizontal_angle, vertical_angle, zoom
        return io.NodeOutput(camera_at(*angles), words_of(*angles))


comfy_entrypoint = entrypoint_of(CameraAngle)
