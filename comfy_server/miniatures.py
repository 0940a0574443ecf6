"""Small drawings of workflow graphs: what a template shows where no picture comes with it.

The packages with the templates' real pictures take half a gigabyte, so they are optional. A graph's
own shape says more than a grey tile: boxes where its nodes lie, curves where they are linked.
Makers' signs become their first letter, sounds a moment of silence.
"""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from PIL import Image, ImageColor, ImageDraw, ImageFont

SIDE = 400  # pixels; the page shows about 260
OVERSAMPLING = 2
MARGIN = 0.06  # of the side
MAX_DRAWN = 400  # nodes and links each; more would not be seen apart
MAX_WORKFLOW_BYTES = 8 * 1024 * 1024
FORMATS = {".webp": "WEBP", ".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG"}
SOUNDS = (".mp3", ".wav", ".flac", ".ogg")

BACKGROUND, BOX, TITLE, ROW = "#1d2026", "#343a46", "#48505f", "#292e38"
OTHER_LINK = "#8d97a8"
LINKS = {
    "MODEL": "#a99be0",
    "CLIP": "#e3c04f",
    "VAE": "#e0716c",
    "CONDITIONING": "#e59a4b",
    "LATENT": "#dd86cf",
    "IMAGE": "#5aa7e8",
    "MASK": "#6fbf86",
    "VIDEO": "#7fb4d8",
    "AUDIO": "#83c7b8",
}
TITLE_HEIGHT, ROW_HEIGHT = 30.0, 26.0  # units of the graph
SMALLEST_NODE = (60.0, 30.0)

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class _Node:
    box: Box
    colour: str
    rows: int


def miniature(path: Path, suffix: str) -> bytes | None:
    """Draws the workflow stored at `path`.

    Args:
        suffix: Of the picture: a key of `FORMATS`.
    Returns:
        A square picture in that format; None when the file holds no graph of the page's form.
    """
    try:
        if path.stat().st_size > MAX_WORKFLOW_BYTES:
            return None
        workflow = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    graph = _largest_graph(workflow)
    nodes = _nodes(graph)
    return _encoded(_drawn(nodes, _links(graph, nodes)), suffix) if nodes else None


def monogram(name: str, suffix: str) -> bytes:
    """A tile with the first letter of `name`, for a maker whose sign is not installed."""
    image = Image.new("RGB", (96, 96), TITLE)
    font = ImageFont.load_default(56)
    ImageDraw.Draw(image).text((48, 48), name[:1].upper(), "#e6e9ef", font, anchor="mm")
    return _encoded(image, suffix)


def silence() -> bytes:
    """A quarter of a second of nothing (WAV), for a sound that is not installed."""
    stream = io.BytesIO()
    with wave.open(stream, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(1)
        sound.setframerate(8000)
        sound.writeframes(b"\x80" * 2000)
    return stream.getvalue()


def _largest_graph(workflow: Any) -> Mapping[str, Any]:
    """The graph itself or the subgraph in it that has the most nodes."""
    found = [workflow] if isinstance(workflow, dict) else []
    definitions = found[0].get("definitions") if found else None
    subgraphs = definitions.get("subgraphs") if isinstance(definitions, dict) else None
    found += [graph for graph in _listed(subgraphs) if isinstance(graph, dict)]
    return max(found, key=lambda graph: len(_listed(graph.get("nodes"))), default={})


def _nodes(graph: Mapping[str, Any]) -> dict[str, _Node]:
    nodes = {}
    for entry in _listed(graph.get("nodes"))[:MAX_DRAWN]:
        if isinstance(entry, dict):
            corner, size = _pair(entry.get("pos")), _pair(entry.get("size"))
            if corner is not None and size is not None:
                nodes[str(entry.get("id"))] = _node(entry, corner, size)
    return nodes


def _node(
    entry: Mapping[str, Any], corner: tuple[float, float], size: tuple[float, float]
) -> _Node:
    (left, top), (width, height) = corner, size
    flags = entry.get("flags")
    is_folded = isinstance(flags, dict) and bool(flags.get("collapsed"))
    height = 0.0 if is_folded else max(height, SMALLEST_NODE[1])
    box = (left, top - TITLE_HEIGHT, left + max(width, SMALLEST_NODE[0]), top + height)
    rows = 0 if is_folded else len(_listed(entry.get("widgets_values")))
    return _Node(box, _colour(entry.get("bgcolor")), min(rows, int(height / ROW_HEIGHT)))


def _links(
    graph: Mapping[str, Any], nodes: Mapping[str, _Node]
) -> list[tuple[tuple[float, float], tuple[float, float], str]]:
    """Start, end and colour of each link between two drawn nodes."""
    found = []
    for entry in _listed(graph.get("links"))[:MAX_DRAWN]:
        if isinstance(entry, list) and len(entry) >= 6:
            _, source, output, target, slot, kind = entry[:6]
        elif isinstance(entry, dict):
            source, output = entry.get("origin_id"), entry.get("origin_slot")
            target, slot, kind = entry.get("target_id"), entry.get("target_slot"), entry.get("type")
        else:
            continue
        if str(source) in nodes and str(target) in nodes:
            start, end = nodes[str(source)].box, nodes[str(target)].box
            ends = (start[2], _slot_y(start, output)), (end[0], _slot_y(end, slot))
            found.append((*ends, LINKS.get(str(kind), OTHER_LINK)))
    return found


def _slot_y(box: Box, slot: Any) -> float:
    index = slot if isinstance(slot, int) and 0 <= slot < MAX_DRAWN else 0
    return min(box[1] + TITLE_HEIGHT + 20.0 * (index + 0.5), box[3])


def _drawn(
    nodes: Mapping[str, _Node],
    links: Iterable[tuple[tuple[float, float], tuple[float, float], str]],
) -> Image.Image:
    side = SIDE * OVERSAMPLING
    image = Image.new("RGB", (side, side), BACKGROUND)
    pen = ImageDraw.Draw(image)
    boxes = [node.box for node in nodes.values()]
    left, top = min(box[0] for box in boxes), min(box[1] for box in boxes)
    width = max(box[2] for box in boxes) - left
    height = max(box[3] for box in boxes) - top
    scale = side * (1 - 2 * MARGIN) / max(width, height)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            side / 2 + (x - left - width / 2) * scale,
            side / 2 + (y - top - height / 2) * scale,
        )

    for start, end, colour in links:
        pen.line(_curve(place(*start), place(*end)), colour, width=3 * OVERSAMPLING // 2)
    for node in nodes.values():
        _draw_node(pen, node, (*place(*node.box[:2]), *place(*node.box[2:])), scale)
    return image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def _curve(start: tuple[float, float], end: tuple[float, float]) -> list[tuple[float, float]]:
    """A cubic curve that leaves to the right and arrives from the left."""
    pull = max(abs(end[0] - start[0]) / 2, 8.0)
    points = []
    for step in range(17):
        t = step / 16
        a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
        x = a * start[0] + b * (start[0] + pull) + c * (end[0] - pull) + d * end[0]
        points.append((x, (a + b) * start[1] + (c + d) * end[1]))
    return points


def _draw_node(pen: ImageDraw.ImageDraw, node: _Node, box: Box, scale: float) -> None:
    left, top, right, bottom = box
    title = top + max(TITLE_HEIGHT * scale, 4.0)
    radius = 8 * scale
    pen.rounded_rectangle((left, top, right, max(bottom, title)), radius, node.colour)
    pen.rounded_rectangle((left, top, right, title), radius, TITLE)
    inset = (right - left) * 0.07
    for row in range(node.rows):
        low = bottom - (row + 0.35) * ROW_HEIGHT * scale
        high = low - 0.6 * ROW_HEIGHT * scale
        if high > title and low - high > 1:
            pen.rounded_rectangle((left + inset, high, right - inset, low), radius / 2, ROW)


def _encoded(image: Image.Image, suffix: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, FORMATS[suffix], quality=80)
    return stream.getvalue()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _pair(value: Any) -> tuple[float, float] | None:
    """Two finite numbers, stored as a list or as an object with the keys "0" and "1"."""
    if isinstance(value, dict):
        value = [value.get("0"), value.get("1")]
    if not isinstance(value, list) or len(value) < 2:
        return None
    pair = value[:2]
    if any(not isinstance(number, (int, float)) or abs(number) > 1e7 for number in pair):
        return None
    return (float(pair[0]), float(pair[1])) if all(map(isfinite, pair)) else None


def _colour(value: Any) -> str:
    """A colour of the page's form, or that of an ordinary node."""
    if isinstance(value, str):
        try:
            ImageColor.getrgb(value)
        except ValueError:
            return BOX
        return value
    return BOX
