"""Nodes that make meshes of voxels, and save them."""

from __future__ import annotations

import os

import folder_paths
from comfy_api.internal.watched_file import watched_file
from comfy_api.latest import io, ui
from comfy_api.latest._util.geometry_types import MESH, VOXEL
from comfy_api.latest.ui.metadata import workflow_texts
from comfy_extras.shapes.glb import glb
from comfy_extras.shapes.surfaces import ALGORITHMS, stacked, surface


def threshold_input() -> io.Float.Input:
    """What lies above it is inside."""
    return io.Float.Input("threshold", default=0.6, min=-1.0, max=1.0, step=0.01)


def mesh_of(voxel: VOXEL, threshold: float, algorithm: str) -> io.NodeOutput:
    """The surfaces of a batch."""
    if voxel.data.ndim != 4 or not voxel.data.numel():
        raise ValueError(
            f"voxel: expected values [batch, depth, height, width], found a tensor of shape "
            f"{tuple(voxel.data.shape)}"
        )
    made = stacked([surface(one, threshold, algorithm) for one in voxel.data])
    return io.NodeOutput(MESH(*made))


class VoxelToMeshBasic(io.ComfyNode):
    """A mesh of the faces of voxels."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VoxelToMeshBasic",
            category="3d",
            inputs=[io.Voxel.Input("voxel"), threshold_input()],
            outputs=[io.Mesh.Output()],
        )

    @classmethod
    def execute(cls, voxel: VOXEL, threshold: float) -> io.NodeOutput:
        return mesh_of(voxel, threshold, "basic")

    decode = execute


class VoxelToMesh(io.ComfyNode):
    """A mesh of voxels, with a choice of how it is made."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="VoxelToMesh",
            category="3d",
            inputs=[
                io.Voxel.Input("voxel"),
                io.Combo.Input("algorithm", options=list(ALGORITHMS)),
                threshold_input(),
            ],
            outputs=[io.Mesh.Output()],
        )

    @classmethod
    def execute(cls, voxel: VOXEL, algorithm: str, threshold: float) -> io.NodeOutput:
        return mesh_of(voxel, threshold, algorithm)

    decode = execute


class SaveGLB(io.ComfyNode):
    """Saves meshes in the output folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveGLB",
            category="3d",
            is_output_node=True,
            inputs=[
                io.Mesh.Input("mesh"),
                io.String.Input("filename_prefix", default="mesh/ComfyUI"),
            ],
            outputs=[],
        )

    @classmethod
    def execute(cls, mesh: MESH, filename_prefix: str) -> io.NodeOutput:
        if mesh.vertices.ndim != 3 or mesh.faces.ndim != 3:
            raise ValueError(
                f"mesh: expected vertices and faces [batch, n, 3], found shapes "
                f"{tuple(mesh.vertices.shape)} and {tuple(mesh.faces.shape)}"
            )
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory()
        )
        texts, saved = workflow_texts(cls), []
        for number, (vertices, faces) in enumerate(zip(mesh.vertices, mesh.faces)):
            file = f"{name.replace('%batch_num%', str(number))}_{counter + number:05}_.glb"
            with watched_file(os.path.join(folder, file)) as target:
                target.write(glb(vertices, faces, texts))
            saved.append(ui.SavedResult(file, subfolder, io.FolderType.output))
        return io.NodeOutput(ui={"3d": saved})

    save = execute
