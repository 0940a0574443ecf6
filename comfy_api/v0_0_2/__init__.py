"""Version 0.0.2 of the interface for authors of nodes."""

from __future__ import annotations

from typing import Any

from comfy_api.internal.async_to_sync import create_sync_class
from comfy_api.latest import (
    ComfyAPI_latest,
    ComfyExtension,
    Input,
    InputImpl,
    Types,
    io,
    ui,
)


class ComfyAPIAdapter_v0_0_2(ComfyAPI_latest):
    """The object through which a node talks to the program, as of 0.0.2."""

    VERSION = "0.0.2"
    STABLE = False


ComfyAPI = ComfyAPIAdapter_v0_0_2
ComfyAPISync: Any = create_sync_class(ComfyAPIAdapter_v0_0_2)
IO, UI = io, ui

__all__ = [
    "IO",
    "UI",
    "ComfyAPI",
    "ComfyAPIAdapter_v0_0_2",
    "ComfyAPISync",
    "ComfyExtension",
    "Input",
    "InputImpl",
    "Types",
    "io",
    "ui",
]
