"""Nodes that read and write folders of pictures and texts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

import folder_paths
import node_helpers
from comfy_api.latest import io
from comfy_api.latest.ui.images import tensor_to_pil
from comfy_extras.dataset.schema import only
from comfy_extras.dataset.sets import single_pictures

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MOST_REPEATS = 10_000  # of a folder; all pictures are in memory, once for each


def picture_files(folder: str) -> list[str]:
    """Paths of the pictures in a folder, sorted by name."""
    return [
        os.path.join(folder, name)
        for name in sorted(os.listdir(folder))
        if name.lower().endswith(SUFFIXES)
    ]


def repeated_files(folder: str) -> Iterator[str]:
    """Pictures of a folder and of its subfolders; one named `<n>_<anything>` counts n times.

    Raises:
        ValueError: A subfolder counts more than `MOST_REPEATS` times.
    """
    yield from picture_files(folder)
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if os.path.isdir(path):
            for _ in range(repeats_of(name)):
                yield from picture_files(path)


def repeats_of(name: str) -> int:
    """How often the pictures of a subfolder count.

    Raises:
        ValueError: More than `MOST_REPEATS` times.
    """
    number = name.split("_")[0]
    if not number.isdecimal():
        return 1
    if len(number) > len(str(MOST_REPEATS)) or int(number) > MOST_REPEATS:
        raise ValueError(
            f"folder {name!r} asks for its pictures {number} times; expected at most "
            f"{MOST_REPEATS}; rename it"
        )
    return int(number)


def read_picture(path: str) -> Tensor:
    """A picture [1, H, W, 3] in 0..1."""
    with node_helpers.pillow(Image.open, path) as opened:
        upright = node_helpers.pillow(ImageOps.exif_transpose, opened)
        pixels = np.asarray(node_helpers.load_pixels(upright, "RGB"), dtype=np.float32)
    return torch.from_numpy(pixels / 255.0).unsqueeze(0)


def input_folder(name: str) -> str:
    """Path of a folder inside the input folder.

    Raises:
        FileNotFoundError: There is none.
    """
    path = folder_paths.confine(folder_paths.get_input_directory(), name)
    if not os.path.isdir(path):
        raise FileNotFoundError(f"there is no folder {name!r} in the input folder")
    return path


def output_folder(name: str) -> str:
    """Path of a folder inside the output folder, made if need be."""
    path = folder_paths.confine(folder_paths.get_output_directory(), name)
    os.makedirs(path, exist_ok=True)
    return path


def folder_input() -> io.Combo.Input:
    """A folder inside the input folder."""
    return io.Combo.Input("folder", options=folder_paths.get_input_subfolders())


class LoadImageDataSetFromFolder(io.ComfyNode):
    """Reads the pictures of a folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoadImageDataSetFromFolder",
            display_name="Load Image Dataset from Folder",
            category="dataset",
            is_experimental=True,
            inputs=[folder_input()],
            outputs=[io.Image.Output(display_name="images", is_output_list=True)],
        )

    @classmethod
    def execute(cls, folder: str) -> io.NodeOutput:
        return io.NodeOutput([read_picture(path) for path in picture_files(input_folder(folder))])


class LoadImageTextDataSetFromFolder(io.ComfyNode):
    """Reads the pictures of a folder and the text beside each."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoadImageTextDataSetFromFolder",
            display_name="Load Image and Text Dataset from Folder",
            category="dataset",
            description="A picture's text is in a .txt file of its name; subfolders named "
            "<n>_<anything> count n times.",
            is_experimental=True,
            inputs=[folder_input()],
            outputs=[
                io.Image.Output(display_name="images", is_output_list=True),
                io.String.Output(display_name="texts", is_output_list=True),
            ],
        )

    @classmethod
    def execute(cls, folder: str) -> io.NodeOutput:
        paths = list(repeated_files(input_folder(folder)))
        return io.NodeOutput(
            [read_picture(path) for path in paths], [caption_of(path) for path in paths]
        )


def caption_of(path: str) -> str:
    """The text beside a picture; empty without one."""
    text_path = os.path.splitext(path)[0] + ".txt"
    if not os.path.isfile(text_path):
        return ""
    with open(text_path, encoding="utf-8") as file:
        return file.read().strip()


def save_inputs() -> list[io.Input]:
    """Where pictures are written."""
    return [
        io.String.Input("folder_name", default="dataset"),
        io.String.Input("filename_prefix", default="image"),
    ]


def write_pictures(images: list[Tensor], folder: str, prefix: str) -> list[str]:
    """Writes each picture as PNG and gives the paths without suffix."""
    if os.path.basename(prefix) != prefix:
        raise ValueError(f"filename_prefix {prefix!r} names a folder; expected a plain name")
    stems = []
    for number, picture in enumerate(single_pictures(images)):
        stems.append(os.path.join(folder, f"{prefix}_{number:05d}"))
        tensor_to_pil(picture[0]).save(f"{stems[-1]}.png")
    return stems


class SaveImageDataSetToFolder(io.ComfyNode):
    """Writes pictures to a folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveImageDataSetToFolder",
            display_name="Save Image Dataset to Folder",
            category="dataset",
            is_experimental=True,
            is_output_node=True,
            is_input_list=True,
            inputs=[io.Image.Input("images"), *save_inputs()],
            outputs=[],
        )

    @classmethod
    def execute(
        cls, images: list[Tensor], folder_name: list[str], filename_prefix: list[str]
    ) -> io.NodeOutput:
        write_pictures(images, output_folder(only(folder_name)), only(filename_prefix))
        return io.NodeOutput()


class SaveImageTextDataSetToFolder(io.ComfyNode):
    """Writes pictures to a folder, each with its text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveImageTextDataSetToFolder",
            display_name="Save Image and Text Dataset to Folder",
            category="dataset",
            is_experimental=True,
            is_output_node=True,
            is_input_list=True,
            inputs=[io.Image.Input("images"), io.String.Input("texts"), *save_inputs()],
            outputs=[],
        )

    @classmethod
    def execute(
        cls,
        images: list[Tensor],
        texts: list[str],
        folder_name: list[str],
        filename_prefix: list[str],
    ) -> io.NodeOutput:
        pictures = sum(batch.shape[0] for batch in images)
        if pictures != len(texts):
            raise ValueError(
                f"texts: expected as many as there are pictures ({pictures}), found {len(texts)}"
            )
        folder = output_folder(only(folder_name))
        for stem, text in zip(write_pictures(images, folder, only(filename_prefix)), texts):
            with open(f"{stem}.txt", "w", encoding="utf-8") as file:
                file.write(text)
        return io.NodeOutput()


NODES: tuple[type[io.ComfyNode], ...] = (
    LoadImageDataSetFromFolder,
    LoadImageTextDataSetFromFolder,
    SaveImageDataSetToFolder,
    SaveImageTextDataSetToFolder,
)
