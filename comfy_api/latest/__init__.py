"""The current version of the interface for authors of nodes.

A package of schema nodes has a function `comfy_entrypoint` that returns a `ComfyExtension`; its
nodes derive from `io.ComfyNode` and show results with the classes of `ui`. While they run they
report through a `ComfyAPI` object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from comfy_api.internal.api_registry import ComfyAPIBase
from comfy_api.internal.async_to_sync import create_sync_class
from comfy_api.latest import _input, _input_impl, _util, io, ui
from comfy_api.latest.execution import Execution, NodeReplacement

if TYPE_CHECKING:
    from torch import Tensor


class ComfyAPI_latest(ComfyAPIBase):
    """The object through which a node talks to the program that runs it."""

    VERSION = "latest"
    STABLE = False

    def __init__(self) -> None:
        self.execution = Execution()
        self.node_replacement = NodeReplacement()


ComfyAPI = ComfyAPI_latest
ComfyAPISync: Any = create_sync_class(ComfyAPI_latest)


class ComfyExtension(ABC):
    """What a package of nodes brings."""

    async def on_load(self) -> None:  # noqa: B027 - overriding it is optional
        """Called once, before the nodes are asked for."""

    @abstractmethod
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """The package's node classes."""


class Input:
    """Types of node inputs."""

    if TYPE_CHECKING:
        Image = Tensor
        Mask = Tensor
    else:
        Image = io.Image.__dict__["Type"]
        Mask = io.Mask.__dict__["Type"]
    Audio = _input.AudioInput
    Latent = _input.LatentInput
    Video = _input.VideoInput


class InputImpl:
    """Implementations of input types."""

    VideoFromFile = _input_impl.VideoFromFile
    VideoFromComponents = _input_impl.VideoFromComponents


class Types:
    """Values that travel between nodes and are no tensors."""

    VideoCodec = _util.VideoCodec
    VideoContainer = _util.VideoContainer
    VideoComponents = _util.VideoComponents
    MESH = _util.MESH
    VOXEL = _util.VOXEL
    SVG = _util.SVG
    File3D = _util.File3D


IO, UI = io, ui

__all__ = [
    "IO",
    "UI",
    "ComfyAPI",
    "ComfyAPISync",
    "ComfyAPI_latest",
    "ComfyExtension",
    "Input",
    "InputImpl",
    "Types",
    "io",
    "ui",
]
