"""Conditioning, latents and meshes of Hunyuan3D, which makes shapes from pictures."""

from __future__ import annotations

from typing import Any

import torch

from comfy.devices import placement
from comfy_api.latest import io
from comfy_extras.declarations import pair_outputs
from comfy_extras.extension import entrypoint_of
from comfy_extras.shapes.nodes import SaveGLB, VoxelToMesh, VoxelToMeshBasic
from comfy_nodes.latent_basics import empty_samples

CHANNELS = 64
SIDES = ("front", "left", "back", "right")
LONGEST_WAVE = 10000.0


def as_pair(states: torch.Tensor) -> io.NodeOutput:
    """States of pictures to follow, and none of them to avoid."""
    return io.NodeOutput([[states, {}]], [[torch.zeros_like(states), {}]])


class EmptyLatentHunyuan3Dv2(io.ComfyNode):
    """An empty latent."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="EmptyLatentHunyuan3Dv2",
            category="latent/3d",
            inputs=[
                io.Int.Input("resolution", default=3072, min=1, max=8192),
                io.Int.Input(
                    "batch_size", default=1, min=1, max=4096, tooltip="Latents made at once."
                ),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, resolution: int, batch_size: int) -> io.NodeOutput:
        device = placement.intermediate_device()
        samples = empty_samples((batch_size, CHANNELS, resolution), device)
        return io.NodeOutput({"samples": samples, "type": "hunyuan3dv2"})

    generate = execute


class Hunyuan3Dv2Conditioning(io.ComfyNode):
    """Shows the model a picture."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Hunyuan3Dv2Conditioning",
            category="conditioning/video_models",
            inputs=[io.ClipVisionOutput.Input("clip_vision_output")],
            outputs=pair_outputs(),
        )

    @classmethod
    def execute(cls, clip_vision_output: Any) -> io.NodeOutput:
        return as_pair(clip_vision_output.last_hidden_state)

    encode = execute


def side_embeddings(width: int) -> torch.Tensor:
    """Sines, then cosines, of the numbers of the four sides [4, width]."""
    half = width // 2
    waves = LONGEST_WAVE ** -(torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(len(SIDES), dtype=torch.float32)[:, None] * waves
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Hunyuan3Dv2ConditioningMultiView(io.ComfyNode):
    """Shows the model pictures of several sides."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Hunyuan3Dv2ConditioningMultiView",
            category="conditioning/video_models",
            inputs=[io.ClipVisionOutput.Input(side, optional=True) for side in SIDES],
            outputs=pair_outputs(),
        )

    @classmethod
    def execute(
        cls, front: Any = None, left: Any = None, back: Any = None, right: Any = None
    ) -> io.NodeOutput:
        given = [(n, one) for n, one in enumerate((front, left, back, right)) if one is not None]
        if not given:
            raise ValueError("no side is given; connect at least one picture")
        states = [(n, one.last_hidden_state) for n, one in given]
        embeddings = side_embeddings(states[0][1].shape[-1])
        return as_pair(torch.cat([one + embeddings[n].to(one) for n, one in states], dim=1))

    encode = execute


comfy_entrypoint = entrypoint_of(
    EmptyLatentHunyuan3Dv2,
    Hunyuan3Dv2Conditioning,
    Hunyuan3Dv2ConditioningMultiView,
    VoxelToMeshBasic,
    VoxelToMesh,
    SaveGLB,
)
