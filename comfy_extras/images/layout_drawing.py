"""A picture of boxes on a canvas: number, colours and words of each."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageColor, ImageDraw, ImageFont

from comfy_extras.images.layout import Box

PLAIN = "#8c8c8c"  # of a box without colours
EMPTY = "#1a1a1a"  # canvas without a picture
DIMMED = 0.75  # share of black over the picture
VEIL = 34  # of 255: opacity of a box
LETTERS = 64  # of the shorter side: its letters are that much smaller


def drawn(
    boxes: Sequence[Box], width: int, height: int, background: Image.Image | None = None
) -> Image.Image:
    """The canvas; the first box lies at the bottom."""
    canvas = Image.new("RGB", (width, height), EMPTY)
    if background is not None:
        stretched = background.convert("RGB").resize((width, height))
        canvas = Image.blend(stretched, Image.new("RGB", (width, height)), DIMMED)
    size = max(10, min(width, height) // LETTERS)
    font = ImageFont.load_default(size)
    for number, box in enumerate(boxes, 1):
        if box.width > 0 and box.height > 0:
            # Drawn apart and pasted: nothing of a box leaves it.
            visible = canvas.crop((box.x, box.y, box.x + box.width, box.y + box.height))
            _fill(visible, box, f"{number:02}", font, size)
            canvas.paste(visible, (box.x, box.y))
    return canvas


def _fill(
    picture: Image.Image,
    box: Box,
    tag: str,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    size: int,
) -> None:
    colours = [_opaque(colour) for colour in box.palette] or [_opaque(PLAIN)]
    first, (width, height) = colours[0], picture.size
    draw = ImageDraw.Draw(picture, "RGBA")
    draw.rectangle((0, 0, width - 1, height - 1), (*first, VEIL), first, max(1, size // 8))
    if box.palette:
        edges = [round(width * n / len(colours)) for n in range(len(colours) + 1)]
        for colour, left, right in zip(colours, edges, edges[1:]):
            draw.rectangle((left, 0, right, size // 2), colour)
    words = f'"{box.text}" {box.desc}' if box.kind == "text" and box.text else box.desc
    columns = max(1, round(width / (size * 0.55)))
    lines = [row for line in words.splitlines() for row in textwrap.wrap(line, columns)]
    draw.multiline_text((size // 2, size * 2), "\n".join(lines), "#ffffff", font)
    draw.rectangle((0, 0, round(size * 1.8), round(size * 1.4)), first)
    dark = sum(first) < 3 * 128
    draw.text((size // 3, size // 6), tag, "#ffffff" if dark else "#000000", font)


def _opaque(colour: str) -> tuple[int, int, int]:
    return ImageColor.getrgb(colour)[:3]
