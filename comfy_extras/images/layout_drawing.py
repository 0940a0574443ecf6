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
SMALLEST_LETTERS = 10  # pixels
LETTERS = 64  # of the shorter side: its letters are that much smaller


def drawn(
    boxes: Sequence[Box], width: int, height: int, background: Image.Image | None = None
) -> Image.Image:
    """The canvas; the first box lies at the bottom."""
    canvas = Image.new("RGB", (width, height), EMPTY)
    if background is not None:
        stretched = background.convert("RGB").resize((width, height))
        canvas = Image.blend(stretched, Image.new("RGB", (width, height)), DIMMED)
    size = max(SMALLEST_LETTERS, min(width, height) // LETTERS)
    font = ImageFont.load_default(size)
    for number, box in enumerate(boxes, 1):
        # Of a side that ends far away, a canvas's length beyond the canvas is enough.
        xs = [min(max(x, -width), 2 * width) for x in (box.x, box.x + box.width)]
        ys = [min(max(y, -height), 2 * height) for y in (box.y, box.y + box.height)]
        left, top, right, bottom = (
            max(xs[0], 0),
            max(ys[0], 0),
            min(xs[1], width),
            min(ys[1], height),
        )
        if left < right and top < bottom:
            # Drawn apart and pasted: nothing of a box leaves it.
            visible = canvas.crop((left, top, right, bottom))
            place = (xs[0] - left, ys[0] - top, xs[1] - left, ys[1] - top)
            _fill(visible, box, place, f"{number:02}", font)
            canvas.paste(visible, (left, top))
    return canvas


def _fill(
    picture: Image.Image,
    box: Box,
    place: tuple[int, int, int, int],
    tag: str,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
) -> None:
    """Draws a box on the part of it that is seen.

    Args:
        place: Left, top, right and bottom of the whole box, in pixels of the picture.
    """
    size = getattr(font, "size", SMALLEST_LETTERS)
    colours = [_opaque(colour) for colour in box.palette] or [_opaque(PLAIN)]
    first, (x, y, right, bottom) = colours[0], place
    width = right - x
    draw = ImageDraw.Draw(picture, "RGBA")
    draw.rectangle((x, y, right - 1, bottom - 1), (*first, VEIL), first, max(1, size // 8))
    if box.palette:
        edges = [x + round(width * n / len(colours)) for n in range(len(colours) + 1)]
        for colour, start, end in zip(colours, edges, edges[1:]):
            draw.rectangle((start, y, end, y + size // 2), colour)
    words = f'"{box.text}" {box.desc}' if box.kind == "text" and box.text else box.desc
    columns = max(1, round(width / (size * 0.55)))
    lines = [row for line in words.splitlines() for row in textwrap.wrap(line, columns)]
    seen = lines[: (bottom - y) // size + 1]
    draw.multiline_text((x + size // 2, y + size * 2), "\n".join(seen), "#ffffff", font)
    draw.rectangle((x, y, x + round(size * 1.8), y + round(size * 1.4)), first)
    dark = sum(first) < 3 * 128
    draw.text((x + size // 3, y + size // 6), tag, "#ffffff" if dark else "#000000", font)


def _opaque(colour: str) -> tuple[int, int, int]:
    return ImageColor.getrgb(colour)[:3]
