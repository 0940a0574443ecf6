"""The versions of the interface that this program offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class ComfyAPIBase:
    """Base of the object through which a node talks to the program that runs it.

    Attributes:
        VERSION: Number of the version, or `latest`.
        STABLE: Whether the version will not change any more.
    """

    VERSION: str = "base"
    STABLE: bool = False


@dataclass(frozen=True)
class ComfyAPIVersion:
    """One version: its number and the class of its object, with a twin without async."""

    version: str
    api_class: type[ComfyAPIBase]
    sync_class: Any


def all_versions() -> list[ComfyAPIVersion]:
    """Every version, oldest first."""
    from comfy_api import latest, v0_0_1, v0_0_2

    return [
        ComfyAPIVersion(module.ComfyAPI.VERSION, module.ComfyAPI, module.ComfyAPISync)
        for module in (v0_0_1, v0_0_2, latest)
    ]
