"""Nodes that save and show 3D files, and make them of meshes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import folder_paths
from comfy import progress
from comfy_api.internal.watched_file import watched_file
from comfy_api.latest import io, ui
from comfy_api.latest._util.geometry_types import MESH, File3D
from comfy_api.latest.ui.metadata import workflow_texts
from comfy_extras.extension import entrypoint_of
from comfy_extras.nodes_load_3d import side_input
from comfy_extras.shapes.glb import glb

logger = logging.getLogger(__name__)

FORMATS = [
    io.File3DGLB, io.File3DGLTF, io.File3DFBX, io.File3DOBJ, io.File3DSTL, io.File3DUSDZ,
    io.File3DAny,
]  # fmt: skip
SUFFIXES = ("glb", "gltf", "fbx", "obj", "stl", "usdz", "ply", "splat", "spz", "ksplat")
ModelInfo = io.Custom("LOAD3D_MODEL_INFO")  # places, turns and sizes of the models of a scene
PREVIEW_PREFIX = "comfy.3d"


def scene_inputs() -> tuple[list[io.Input], list[io.Input]]:
    """Inputs of a 3D view: the required ones, and the optional ones that replace parts of it."""
    view: list[io.Input] = [
        io.Load3D.Input("viewport_state"),
        side_input("width"),
        side_input("height"),
    ]
    more: list[io.Input] = [
        ModelInfo.Input(
            "model_3d_info", optional=True, tooltip="Where the models stand, in place of the view."
        ),
        io.Load3DCamera.Input(
            "camera_info", optional=True, tooltip="Where the camera stands, in place of the view."
        ),
    ]
    return view, more


def scene_outputs() -> list[io.Output]:
    """The file, and how it is seen."""
    return [
        io.File3DAny.Output(display_name="model_3d"),
        ModelInfo.Output(display_name="model_3d_info"),
        io.Load3DCamera.Output(display_name="camera_info"),
        io.Int.Output(display_name="width"),
        io.Int.Output(display_name="height"),
    ]


def written(model_3d: File3D, prefix: str, folder_type: io.FolderType) -> ui.SavedResult:
    """Writes a file under a free name.

    Raises:
        ValueError: Nothing says of what format it is, or it is none that the editor shows.
    """
    if model_3d.format not in SUFFIXES:
        raise ValueError(
            f"model_3d: expected a file of a format among {', '.join(SUFFIXES)}, found "
            f"{model_3d.format or 'one without a format'}"
        )
    root = folder_paths.get_directory_by_type(folder_type.value)
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, str(root))
    file = f"{name}_{counter:05}_.{model_3d.format}"
    with watched_file(os.path.join(folder, file)) as target:
        target.write(model_3d.get_bytes())
    return ui.SavedResult(file, subfolder, folder_type)


def shown(
    saved: ui.SavedResult,
    model_3d: File3D,
    view: Any,
    places: Any,
    camera: Any,
    sides: tuple[int, int],
) -> io.NodeOutput:
    """The outputs of both nodes, with what the editor shows: inputs go before its own view."""
    state: Mapping[str, Any] = view if isinstance(view, Mapping) else {}
    places = state.get("model_3d_info") or [] if places is None else places
    camera = state.get("camera_info") if camera is None else camera
    seen = {"3d": [saved], "camera_info": [camera], "model_3d_info": places}
    return io.NodeOutput(model_3d, places, camera, *sides, ui=seen)


class Save3DAdvanced(io.ComfyNode):
    """Saves a 3D file in the output folder, and shows it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        view, more = scene_inputs()
        return io.Schema(
            node_id="Save3DAdvanced",
            display_name="Save 3D (Advanced)",
            category="3d",
            description="Saves a 3D file in the output folder, and shows it.",
            is_output_node=True,
            inputs=[
                io.MultiType.Input("model_3d", FORMATS),
                io.String.Input("filename_prefix", default="3d/ComfyUI"),
                *view,
                *more,
            ],
            outputs=scene_outputs(),
        )

    @classmethod
    def execute(
        cls,
        model_3d: File3D,
        filename_prefix: str,
        viewport_state: Any,
        width: int,
        height: int,
        model_3d_info: Any = None,
        camera_info: Any = None,
    ) -> io.NodeOutput:
        saved = written(model_3d, filename_prefix, io.FolderType.output)
        seen = viewport_state, model_3d_info, camera_info
        return shown(saved, model_3d, *seen, (width, height))


class Preview3DAdvanced(io.ComfyNode):
    """Shows a 3D file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        view, more = scene_inputs()
        return io.Schema(
            node_id="Preview3DAdvanced",
            display_name="Preview 3D (Advanced)",
            category="3d",
            description="Shows a 3D file without saving it in the output folder.",
            is_output_node=True,
            inputs=[io.MultiType.Input("model_3d", FORMATS), *view, *more],
            outputs=scene_outputs(),
        )

    @classmethod
    def execute(
        cls,
        model_3d: File3D,
        viewport_state: Any,
        width: int,
        height: int,
        model_3d_info: Any = None,
        camera_info: Any = None,
    ) -> io.NodeOutput:
        saved = written(model_3d, PREVIEW_PREFIX, io.FolderType.temp)
        seen = viewport_state, model_3d_info, camera_info
        return shown(saved, model_3d, *seen, (width, height))


class MeshToFile3D(io.ComfyNode):
    """Makes a GLB file of a mesh."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MeshToFile3D",
            display_name="Create 3D File (from Mesh)",
            category="3d",
            description="A GLB file of a mesh, to be saved or shown.",
            inputs=[io.Mesh.Input("mesh")],
            outputs=[io.File3DGLB.Output(display_name="model_3d")],
        )

    @classmethod
    def execute(cls, mesh: MESH) -> io.NodeOutput:
        if mesh.vertices.ndim != 3 or mesh.faces.ndim != 3 or not len(mesh.vertices):
            raise ValueError(
                "mesh: expected vertices and faces [batch, n, 3], found shapes "
                f"{tuple(mesh.vertices.shape)} and {tuple(mesh.faces.shape)}"
            )
        if len(mesh.vertices) > 1:
            progress.warn(
                logger,
                "mesh: a file holds one, and there are %d: the first is taken; SaveGLB saves all",
                len(mesh.vertices),
            )
        content = glb(mesh.vertices[0], mesh.faces[0], workflow_texts(cls))
        return io.NodeOutput(File3D(BytesIO(content), "glb"))


comfy_entrypoint = entrypoint_of(Save3DAdvanced, Preview3DAdvanced, MeshToFile3D)
