"""Boxes that a person draws on a canvas, with what is to be seen in each.

Three forms of the same: `Box` here; the editor's records (pixels, and the words under "metadata");
and the elements of structured prompts, whose corners `[top, left, bottom, right]` lie in 0..1000.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GRID = 1000  # parts of a side in elements
SIDES = ("x", "y", "width", "height")
COLOUR = re.compile(r"#(?:[0-9a-fA-F]{3}|[0-9a-fA-F]{6}|[0-9a-fA-F]{8})")
EXPECTED = (
    "expected boxes with x, y, width and height, elements with a bbox of four numbers, or JSON of "
    "either"
)


@dataclass(frozen=True)
class Box:
    """A box in pixels, from the upper left corner.

    Attributes:
        kind: "obj" or "text".
        text: Letters to be seen, where the kind is "text".
        desc: Words about it.
        palette: Colours as `#rrggbb`.
    """

    x: int
    y: int
    width: int
    height: int
    kind: str = "obj"
    text: str = ""
    desc: str = ""
    palette: tuple[str, ...] = ()

    def place(self) -> dict[str, int]:
        """Where it is."""
        return {"x": self.x, "y": self.y, "width": self.width, "height": self.height}

    def record(self) -> dict[str, Any]:
        """The editor's form."""
        words = {"type": self.kind, "text": self.text, "desc": self.desc}
        return {**self.place(), "metadata": {**words, "palette": list(self.palette)}}

    def element(self, width: int, height: int) -> dict[str, Any]:
        """The form of structured prompts, on a canvas of `width` x `height` pixels."""

        def part(pixels: int, whole: int) -> int:
            return min(max(round(pixels * GRID / whole), 0), GRID)

        top, bottom = part(self.y, height), part(self.y + self.height, height)
        left, right = part(self.x, width), part(self.x + self.width, width)
        made: dict[str, Any] = {"type": self.kind, "bbox": [top, left, bottom, right]}
        if self.kind == "text":
            made["text"] = self.text
        made["desc"] = self.desc
        if self.palette:
            made["color_palette"] = list(self.palette)
        return made


def boxes_of(value: Any, width: int, height: int, name: str) -> list[Box]:
    """Boxes on a canvas of `width` x `height` pixels, in any of the three forms.

    Args:
        value: A record or an element, a list of them, JSON of that, or nothing.
        name: Of the input, for errors.
    Raises:
        ValueError: It is something else.
    """
    if isinstance(value, str):
        value = _parsed(value, name)
    if value is None:
        return []
    entries = [value] if isinstance(value, Mapping) else value
    if not isinstance(entries, Sequence):
        raise ValueError(f"{name}: {EXPECTED}; found {value!r:.100}")
    return [_box(entry, width, height, f"{name} {n}") for n, entry in enumerate(entries, 1)]


def _parsed(text: str, name: str) -> Any:
    if not text.strip():
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: {EXPECTED}; found text that is no JSON ({error})") from error


def _box(entry: Any, width: int, height: int, name: str) -> Box:
    """A box of one record or element."""
    if isinstance(entry, Mapping):
        corners = entry.get("bbox")
        if isinstance(corners, Sequence) and len(corners) == 4 and all(map(_is_number, corners)):
            top, left, bottom, right = corners
            sides = [left * width / GRID, top * height / GRID]
            sides += [(right - left) * width / GRID, (bottom - top) * height / GRID]
            return _described(sides, entry, entry.get("color_palette"))
        if all(_is_number(entry.get(side)) for side in SIDES):
            words = entry.get("metadata")
            words = words if isinstance(words, Mapping) else {}
            return _described([entry[side] for side in SIDES], words, words.get("palette"))
    raise ValueError(f"{name}: {EXPECTED}; found {entry!r:.100}")


def _described(sides: Sequence[float], words: Mapping[str, Any], palette: Any) -> Box:
    x, y, width, height = (round(side) for side in sides)
    colours = palette if isinstance(palette, list) else []
    text, desc = (str(words.get(key) or "") for key in ("text", "desc"))
    kind = "text" if words.get("type") == "text" else "obj"
    known = tuple(one for one in colours if isinstance(one, str) and COLOUR.fullmatch(one))
    return Box(x, y, width, height, kind, text, desc, known)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9
