"""The table of node classes: built-in ones first, optional ones and packs added at start.

The two dicts are public: packs read, extend and replace entries in them, so they are never copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comfy_nodes import (
    conditioning,
    control,
    image,
    image_files,
    latent,
    latent_files,
    loaders,
    sampling,
    special_loaders,
    style,
    vae,
    vision,
)

CATEGORIES = (
    sampling,
    loaders,
    special_loaders,
    conditioning,
    control,
    style,
    latent,
    latent_files,
    vae,
    vision,
    image,
    image_files,
)

NODE_CLASS_MAPPINGS: dict[str, Any] = {
    name: node for module in CATEGORIES for name, node in module.NODE_CLASS_MAPPINGS.items()
}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {
    name: title
    for module in CATEGORIES
    for name, title in module.NODE_DISPLAY_NAME_MAPPINGS.items()
}


def add_nodes(nodes: Mapping[str, Any], titles: Mapping[str, str]) -> None:
    """Adds a module's node classes and display names; a later class replaces an earlier one."""
    NODE_CLASS_MAPPINGS.update(nodes)
    NODE_DISPLAY_NAME_MAPPINGS.update(titles)
