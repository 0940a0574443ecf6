"""Conditioning, latents and meshes of Hunyuan3D, which makes shapes from pictures."""

from __future__ import annotations

from typing import Any

import torch

from comfy.clip_vision import states_of
from comfy.devices import placement
from comfy_api.latest import io
from comfy_api.latest._util.geometry_types import VOXEL
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
        return as_pair(states_of(clip_vision_output, "clip_vision_output"))

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
            raise ValueError("front, left, back, right: expected at least one, found none")
        states = [(n, states_of(one, SIDES[n])) for n, one in given]
        first = states[0][1]
        for n, one in states:
            sizes = [(*state.shape[:1], *state.shape[2:]) for state in (one, first)]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"{SIDES[n]}: expected as many pictures as {SIDES[states[0][0]]} has, seen by "
                    f"the same encoder, states {tuple(first.shape)}, found {tuple(one.shape)}"
                )
        embeddings = side_embeddings(states[0][1].shape[-1])
        return as_pair(torch.cat([one + embeddings[n].to(one) for n, one in states], dim=1))

    encode = execute


class VAEDecodeHunyuan3D(io.ComfyNode):
    """Evaluates a decoded latent on a grid: above one half lies the inside of the shape."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VAEDecodeHunyuan3D",
            category="latent/3d",
            inputs=[
                io.Latent.Input("samples"),
                io.Vae.Input("vae"),
                io.Int.Input(
                    "num_chunks",
                    default=8000,
                    min=1000,
                    max=500000,
                    tooltip="Grid points evaluated at a time.",
                ),
                io.Int.Input(
                    "octree_resolution",
                    default=256,
                    min=16,
                    max=512,
                    tooltip="Cells along each side of the grid.",
                ),
            ],
            outputs=[io.Voxel.Output()],
        )

    @classmethod
    def execute(
        cls, samples: dict[str, Any], vae: Any, num_chunks: int, octree_resolution: int
    ) -> io.NodeOutput:
        options = {"num_chunks": num_chunks, "octree_resolution": octree_resolution}
        if getattr(vae.first_stage_model, "makes_shapes", False):
            return io.NodeOutput(VOXEL(vae.decode(samples["samples"], vae_options=options)))
        raise ValueError("this VAE makes pictures, not shapes; connect that of a Hunyuan3D 2 model")

    decode = execute


comfy_entrypoint = entrypoint_of(
    EmptyLatentHunyuan3Dv2,
    Hunyuan3Dv2Conditioning,
    Hunyuan3Dv2ConditioningMultiView,
    VAEDecodeHunyuan3D,
    VoxelToMeshBasic,
    VoxelToMesh,
    SaveGLB,
)
