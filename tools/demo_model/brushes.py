"""Painters of single shapes and objects.

Each painter draws one thing of radius `r` (pixels) around (`cx`, `cy`) on a Pillow drawing
surface; the two tables at the end are the whole repertoire. Surfaces are supersampled, so nothing
here smooths edges.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from PIL import ImageDraw

RGB = tuple[int, int, int]
Point = tuple[float, float]
INK, PAPER = (26, 24, 24), (250, 250, 248)


def shade(colour: RGB, factor: float) -> RGB:
    """`colour` made darker (factor < 1) or brighter."""
    r, g, b = (int(max(0, min(255, value * factor))) for value in colour)
    return r, g, b


def mix(first: RGB, second: RGB, share: float) -> RGB:
    """A blend holding `share` (0..1) of `second`."""
    r, g, b = (int(a * (1 - share) + c * share) for a, c in zip(first, second))
    return r, g, b


def varied(colour: RGB, rng: random.Random, amount: float = 10) -> RGB:
    """`colour` with each channel moved by up to `amount`, so that no name means a single value."""
    r, g, b = (int(max(0, min(255, value + rng.uniform(-amount, amount)))) for value in colour)
    return r, g, b


def star_points(
    cx: float, cy: float, radii: Sequence[float], count: int, turn: float = 0.0
) -> list[Point]:
    """Corners of a polygon starting at the top; several `radii` alternate (a star has two)."""
    total = count * len(radii)
    angles = [turn - math.pi / 2 + 2 * math.pi * i / total for i in range(total)]
    return [
        (cx + radii[i % len(radii)] * math.cos(a), cy + radii[i % len(radii)] * math.sin(a))
        for i, a in enumerate(angles)
    ]


class Brush:
    """Draws in units of a radius around a centre: (0, 0) is the middle, 1 the radius."""

    def __init__(
        self,
        surface: ImageDraw.ImageDraw,
        cx: float,
        cy: float,
        r: float,
        colour: RGB,
        rng: random.Random,
    ) -> None:
        self.surface, self.cx, self.cy, self.r = surface, cx, cy, r
        self.colour, self.rng = colour, rng

    @property
    def dark(self) -> RGB:
        """A darker relative of the main colour."""
        return shade(self.colour, 0.62)

    @property
    def light(self) -> RGB:
        """A lighter relative of the main colour."""
        return mix(self.colour, (255, 255, 255), 0.45)

    @property
    def is_dark(self) -> bool:
        """Whether details must be light to be seen."""
        return sum(self.colour) <= 200

    def at(self, x: float, y: float) -> Point:
        """Surface pixels of a point given in radii."""
        return self.cx + x * self.r, self.cy + y * self.r

    def ellipse(self, x: float, y: float, rx: float, ry: float, colour: RGB | None = None) -> None:
        """A filled ellipse around (x, y)."""
        self.surface.ellipse(
            [self.at(x - rx, y - ry), self.at(x + rx, y + ry)], fill=colour or self.colour
        )

    def box(self, x0: float, y0: float, x1: float, y1: float, colour: RGB | None = None) -> None:
        """A filled upright rectangle."""
        self.surface.rectangle([self.at(x0, y0), self.at(x1, y1)], fill=colour or self.colour)

    def polygon(self, points: Sequence[Point], colour: RGB | None = None) -> None:
        """A filled polygon."""
        self.surface.polygon([self.at(x, y) for x, y in points], fill=colour or self.colour)

    def stroke(self, points: Sequence[Point], width: float, colour: RGB) -> None:
        """An open line of `width` radii, two surface pixels at least."""
        self.surface.line(
            [self.at(x, y) for x, y in points], fill=colour, width=max(2, int(self.r * width))
        )


def _circle(brush: Brush) -> None:
    brush.ellipse(0, 0, 1, 1)


def _square(brush: Brush) -> None:
    turn = brush.rng.uniform(-0.08, 0.08) + math.pi / 4
    brush.polygon(star_points(0, 0, [0.9 * math.sqrt(2)], 4, turn))


def _triangle(brush: Brush) -> None:
    brush.polygon(star_points(0, 0.18, [1.18], 3, brush.rng.uniform(-0.08, 0.08)))


def _star(brush: Brush) -> None:
    brush.polygon(star_points(0, 0, [1.15, 0.483], 5, brush.rng.uniform(-0.08, 0.08)))


def _heart(brush: Brush) -> None:
    points = []
    for i in range(60):
        t = 2 * math.pi * i / 60
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((math.sin(t) ** 3, -(y + 2) / 15))
    brush.polygon(points)


def _ring(brush: Brush) -> None:
    box = [brush.at(-1, -1), brush.at(1, 1)]
    brush.surface.ellipse(box, outline=brush.colour, width=max(2, int(brush.r * 0.34)))


def _cross(brush: Brush) -> None:
    brush.box(-0.36, -1, 0.36, 1)
    brush.box(-1, -0.36, 1, 0.36)


def _hexagon(brush: Brush) -> None:
    brush.polygon(star_points(0, 0, [1.05], 6, brush.rng.uniform(-0.08, 0.08)))


def _diamond(brush: Brush) -> None:
    brush.polygon([(0, -1.2), (0.8, 0), (0, 1.2), (-0.8, 0)])


def _house(brush: Brush) -> None:
    brush.box(-0.8, -0.2, 0.8, 1)
    brush.polygon([(-1, -0.18), (0, -1), (1, -0.18)], brush.dark)
    brush.box(-0.18, 0.35, 0.18, 1, (92, 58, 34))
    for x in (-0.5, 0.5):
        brush.box(x - 0.17, 0.06, x + 0.17, 0.4, (250, 236, 150))


def _tree(brush: Brush) -> None:
    brush.box(-0.14, 0.1, 0.14, 1, (110, 70, 38))
    for x, y, r in ((0, -0.45, 0.55), (-0.38, -0.1, 0.45), (0.38, -0.1, 0.45)):
        brush.ellipse(x, y, r, r)


def _sun(brush: Brush) -> None:
    rays = mix(brush.colour, (255, 150, 30), 0.35)
    brush.polygon(star_points(0, 0, [1.05, 0.756], 12, brush.rng.uniform(0, 0.5)), rays)
    brush.ellipse(0, 0, 0.68, 0.68)


def _moon(brush: Brush) -> None:
    arc = [math.pi * i / 39 for i in range(40)]
    outer = [(0.35 - math.sin(t), -math.cos(t)) for t in arc]
    inner = [(0.35 - 0.42 * math.sin(t), -math.cos(t)) for t in reversed(arc)]
    brush.polygon(outer + inner)


def _flower(brush: Brush) -> None:
    brush.box(-0.07, 0, 0.07, 1.1, (50, 140, 60))
    turn = brush.rng.uniform(0, 1)
    for i in range(6):
        angle = turn + i * math.pi / 3
        brush.ellipse(0.5 * math.cos(angle), 0.5 * math.sin(angle) - 0.2, 0.33, 0.33)
    is_yellowish = brush.colour[2] <= 90 and brush.colour[1] >= 150
    brush.ellipse(0, -0.2, 0.3, 0.3, (140, 80, 30) if is_yellowish else (250, 200, 40))


def _smiley(brush: Brush) -> None:
    brush.ellipse(0, 0, 1, 1)
    ink = (240, 240, 240) if brush.is_dark else INK
    for x in (-0.36, 0.36):
        brush.ellipse(x, -0.25, 0.14, 0.17, ink)
    box = [brush.at(-0.58, -0.5), brush.at(0.58, 0.62)]
    brush.surface.arc(box, 20, 160, fill=ink, width=max(3, int(brush.r * 0.13)))


def _fish(brush: Brush) -> None:
    brush.ellipse(-0.2, 0, 0.8, 0.55)
    brush.polygon([(0.4, 0), (1.05, -0.5), (1.05, 0.5)], brush.dark)
    brush.ellipse(-0.55, -0.13, 0.14, 0.14, PAPER)
    brush.ellipse(-0.55, -0.13, 0.08, 0.08, INK)


def _boat(brush: Brush) -> None:
    brush.polygon([(-1, 0.35), (1, 0.35), (0.6, 0.8), (-0.6, 0.8)])
    brush.box(-0.05, -0.95, 0.05, 0.35, (90, 60, 40))
    brush.polygon([(0.1, -0.9), (0.1, 0.22), (0.82, 0.22)], PAPER)
    brush.polygon([(-0.1, -0.7), (-0.1, 0.22), (-0.65, 0.22)], brush.light)


def _cloud(brush: Brush) -> None:
    for x, y, r in ((-0.5, 0.1, 0.38), (0, -0.12, 0.52), (0.5, 0.1, 0.4), (0, 0.2, 0.36)):
        brush.ellipse(x, y, r, r)
    brush.box(-0.5, 0.1, 0.5, 0.48)


def _mushroom(brush: Brush) -> None:
    brush.box(-0.28, 0, 0.28, 0.9, (240, 226, 200))
    brush.surface.pieslice([brush.at(-1, -0.9), brush.at(1, 1)], 180, 360, fill=brush.colour)
    for x, y, r in ((-0.5, -0.25, 0.13), (0.05, -0.5, 0.17), (0.52, -0.2, 0.13)):
        brush.ellipse(x, y, r, r, PAPER)


def _balloon(brush: Brush) -> None:
    brush.stroke([(0, 0.5), (0.1, 1.1)], 0.05, (90, 90, 90))
    brush.ellipse(0, -0.2, 0.72, 0.8)
    brush.ellipse(-0.3, -0.475, 0.15, 0.225, brush.light)


def _cat(brush: Brush) -> None:
    for side in (-1, 1):
        brush.polygon([(side * 0.85, -0.95), (side * 0.9, 0), (side * 0.15, -0.55)])
    brush.ellipse(0, 0.075, 0.92, 0.775)
    ink = (240, 230, 120) if brush.is_dark else INK
    for x in (-0.38, 0.38):
        brush.ellipse(x, -0.11, 0.13, 0.17, ink)
    brush.polygon([(-0.12, 0.2), (0.12, 0.2), (0, 0.36)], (236, 120, 140))
    for side in (-1, 1):
        for y in (0.22, 0.42):
            brush.stroke([(side * 0.3, 0.32), (side * 1.05, y)], 0.05, ink)


PAINTERS: dict[str, Callable[[Brush], None]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "star": _star,
    "heart": _heart,
    "ring": _ring,
    "cross": _cross,
    "hexagon": _hexagon,
    "diamond": _diamond,
    "house": _house,
    "tree": _tree,
    "sun": _sun,
    "moon": _moon,
    "flower": _flower,
    "smiley face": _smiley,
    "fish": _fish,
    "boat": _boat,
    "cloud": _cloud,
    "mushroom": _mushroom,
    "balloon": _balloon,
    "cat": _cat,
}
