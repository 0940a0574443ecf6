"""Nodes that show 3D files in the editor, and take what it draws of them."""

from __future__ import annotations

import os
import shutil
from typing import Any

import folder_paths
from comfy_api.latest import InputImpl, io, ui
from comfy_extras.extension import entrypoint_of
from comfy_nodes.image_files import LoadImage

FOLDER = "3d"  # below the input folder
SUFFIXES = (".gltf", ".glb", ".obj", ".fbx", ".stl")


def model_files() -> list[str]:
    """Names of the 3D files in the input folder, relative to it and sorted."""
    root = folder_paths.get_input_directory()
    found = []
    for folder, _, names in os.walk(os.path.join(root, FOLDER)):
        for name in names:
            if name.lower().endswith(SUFFIXES):
                path = os.path.relpath(os.path.join(folder, name), root)
                found.append(path.replace(os.sep, "/"))
    return sorted(found)


def below_output(model_file: str) -> str:
    """Path of a 3D file below the output folder, which is all that the editor's viewer reads.

    A file that is only in the input folder (or in the one its name is marked with, as in
    `a.glb [temp]`) is copied there under the same name.

    Raises:
        ValueError: the name leads outside the folders.
    """
    name, marked = folder_paths.annotated_filepath(model_file)
    source = folder_paths.confine(marked or folder_paths.get_input_directory(), name)
    target = folder_paths.confine(folder_paths.get_output_directory(), name)
    if os.path.isfile(source) and not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        shutil.copyfile(source, target)
    return name


def side_input(id: str) -> io.Int.Input:
    """A side of the drawing in pixels."""
    return io.Int.Input(id, default=1024, min=1, max=4096, step=1)


class Load3D(io.ComfyNode):
    """What the editor drew of a 3D file: picture, mask, normals, camera, and a recording."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Load3D",
            display_name="Load 3D & Animation",
            category="3d",
            is_experimental=True,
            inputs=[
                io.Combo.Input("model_file", options=model_files(), upload=io.UploadType.model),
                io.Load3D.Input("image"),
                side_input("width"),
                side_input("height"),
            ],
            outputs=[
                io.Image.Output(display_name="image"),
                io.Mask.Output(display_name="mask"),
                io.String.Output(display_name="mesh_path"),
                io.Image.Output(display_name="normal"),
                io.Load3DCamera.Output(display_name="camera_info"),
                io.Video.Output(display_name="recording_video"),
            ],
        )

    @classmethod
    def execute(cls, model_file: str, image: dict[str, Any], **kwargs: Any) -> io.NodeOutput:
        del kwargs  # the editor drew at that size
        load = LoadImage().load_image
        video = None
        if image.get("recording"):
            path = folder_paths.get_annotated_filepath(image["recording"])
            video = InputImpl.VideoFromFile(path)
        return io.NodeOutput(
            load(image["image"])[0],
            load(image["mask"])[1],
            model_file,
            load(image["normal"])[0],
            image.get("camera_info"),
            video,
        )

    process = execute


class Preview3D(io.ComfyNode):
    """Shows a 3D file of the output folder, or brings it there."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="Preview3D",
            display_name="Preview 3D & Animation",
            category="3d",
            is_experimental=True,
            is_output_node=True,
            inputs=[
                io.String.Input("model_file", default=""),
                io.Load3DCamera.Input("camera_info", optional=True),
                io.Image.Input("bg_image", optional=True),
            ],
            outputs=[],
        )

    @classmethod
    def execute(cls, model_file: str, **kwargs: Any) -> io.NodeOutput:
        shown = ui.PreviewUI3D(
            below_output(model_file),
            kwargs.get("camera_info"),
            bg_image=kwargs.get("bg_image"),
            cls=cls,
        )
        return io.NodeOutput(ui=shown)

    process = execute


comfy_entrypoint = entrypoint_of(Load3D, Preview3D)
