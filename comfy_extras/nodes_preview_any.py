"""A node that shows any value as text."""

from __future__ import annotations

import json
from typing import Any


class PreviewAny:
    """Shows a value as text: text as it is, numbers, lists and dicts as JSON, the rest as Python
    does.
    """

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"source": ("*", {})}}

    RETURN_TYPES = ()
    FUNCTION = "main"
    OUTPUT_NODE = True
    CATEGORY = "utils"
    SEARCH_ALIASES = ["show text", "inspect", "debug"]  # noqa: RUF012 - a node's attribute

    def main(self, source: Any = None) -> dict[str, Any]:
        """The text for the editor."""
        return {"ui": {"text": (as_text(source),)}}


def as_text(value: Any) -> str:
    """A value in words."""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float, bool)):
        return str(value)
    if value is None:
        return "None"
    try:
        return json.dumps(value, indent=4)
    except (TypeError, ValueError):
        return str(value)


NODE_CLASS_MAPPINGS: dict[str, type] = {"PreviewAny": PreviewAny}

NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {"PreviewAny": "Preview as Text"}
