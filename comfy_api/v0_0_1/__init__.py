"""Version 0.0.1 of the interface for authors of nodes: values and progress, no schema nodes."""

from __future__ import annotations

from typing import Any

from comfy_api.internal.async_to_sync import create_sync_class
from comfy_api.v0_0_2 import ComfyAPIAdapter_v0_0_2, Input, InputImpl, Types


class ComfyAPIAdapter_v0_0_1(ComfyAPIAdapter_v0_0_2):
    """The object through which a node talks to the program, as of 0.0.1."""

    VERSION = "0.0.1"
    STABLE = True


ComfyAPI = ComfyAPIAdapter_v0_0_1
ComfyAPISync: Any = create_sync_class(ComfyAPIAdapter_v0_0_1)

__all__ = ["ComfyAPI", "ComfyAPIAdapter_v0_0_1", "ComfyAPISync", "Input", "InputImpl", "Types"]
