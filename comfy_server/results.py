"""Whether what a node showed is still there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import folder_paths


def files_exist(ui: Mapping[str, Any]) -> bool:
    """Whether every file that a node's UI object names still exists.

    Args:
        ui: Lists by key; items that name no file, or one of a folder unknown here, do not count.
    """
    items = (item for items in ui.values() if isinstance(items, list) for item in items)
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get("filename"), str):
            continue
        root = folder_paths.get_directory_by_type(item.get("type", "output"))
        if root is not None and not os.path.isfile(
            os.path.join(root, item.get("subfolder") or "", item["filename"])
        ):
            return False
    return True
