"""Paints a `Scene` at any picture size.

Usage: python -m tools.demo_model.paint SEED --size 256 256 --out FILE.png

Lengths are fractions of the shorter side and places are fractions of width and height, so one
scene can be painted square, wide or tall. Pictures are drawn `SUPERSAMPLING` times larger and
averaged down.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from tools.demo_model.brushes import PAINTERS, RGB, Brush, mix, shade, star_points, varied
from tools.demo_model.scenes import (
    COLOURS,
    POSITIONS,
    SIZES,
    Background,
    Landscape,
    Scene,
    random_scene,
)

SUPERSAMPLING = 3
STARLIGHT = (255, 250, 210)
_SKY = {  # colour at the top and at the horizon
    "day": ((90, 165, 235), (190, 225, 250)),
    "sunset": ((226, 90, 90), (252, 190, 90)),
    "night": ((14, 18, 52), (44, 52, 104)),
}
_DAYLIGHT = {"day": 1.0, "sunset": 0.82, "night": 0.5}
_GROUND = {
    "grass": (86, 170, 70),
    "sea": (34, 100, 180),
    "snow": (236, 242, 248),
    "desert": (232, 196, 120),
    "mountains": (100, 160, 80),
}
_LANDSCAPE_RADIUS = {
    "house": 0.17,
    "tree": 0.18,
    "flower": 0.12,
    "mushroom": 0.12,
    "boat": 0.17,
    "fish": 0.13,
}


class _Canvas:
    """A supersampled surface with its unit of length, the shorter side."""

    def __init__(self, width: int, height: int, rng: random.Random) -> None:
        self.width, self.height = width * SUPERSAMPLING, height * SUPERSAMPLING
        self.unit = min(self.width, self.height)
        self.rng = rng
        self.image = Image.new("RGB", (self.width, self.height))
        self.surface = ImageDraw.Draw(self.image)

    def gradient(self, top: RGB, bottom: RGB, end: float) -> None:
        """Blend from `top` at the upper edge to `bottom` at `end` (pixels) and below."""
        share = np.clip(np.arange(self.height) / end, 0, 1)[:, None, None]
        rows = np.array(top)[None, None] * (1 - share) + np.array(bottom)[None, None] * share
        pixels = np.broadcast_to(rows, (self.height, self.width, 3)).astype(np.uint8)
        self.image.paste(Image.fromarray(np.ascontiguousarray(pixels)))

    def stars(self, bottom: float) -> None:
        """Scatter four-pointed stars above `bottom` (pixels), as many as the area asks for."""
        area = self.width * bottom / self.unit**2
        for _ in range(round(self.rng.uniform(10, 18) * area)):
            x, y = self.rng.uniform(0, self.width), self.rng.uniform(0, bottom)
            r = self.rng.uniform(0.02, 0.036) * self.unit
            self.surface.polygon(star_points(x, y, [r, r * 0.45], 4), fill=STARLIGHT)

    def paint(self, kind: str, x: float, y: float, r: float, colour: RGB) -> None:
        """Draw one shape or object; all lengths in pixels."""
        PAINTERS[kind](Brush(self.surface, x, y, r, colour, self.rng))

    def jitter(self, amount: float) -> float:
        """A small displacement of up to `amount` units, in pixels."""
        return self.rng.uniform(-amount, amount) * self.unit


def _paint_stripes(canvas: _Canvas, colour: RGB) -> None:
    step = canvas.unit / canvas.rng.choice([6, 8])
    for i in range(0, round(canvas.width / step) + 1, 2):
        canvas.surface.rectangle([i * step, 0, (i + 1) * step - 1, canvas.height], fill=colour)


def _paint_checker(canvas: _Canvas, colour: RGB) -> None:
    step = canvas.unit / canvas.rng.choice([6, 8])
    for i in range(round(canvas.width / step) + 1):
        for j in range(round(canvas.height / step) + 1):
            if (i + j) % 2:
                box = [i * step, j * step, (i + 1) * step - 1, (j + 1) * step - 1]
                canvas.surface.rectangle(box, fill=colour)


def _paint_dots(canvas: _Canvas, colour: RGB) -> None:
    step = canvas.unit / 5
    r = step * 0.24
    for i in range(round(canvas.width / step) + 1):
        for j in range(round(canvas.height / step) + 1):
            x, y = i * step, j * step + (step / 2 if i % 2 else 0)
            canvas.surface.ellipse([x - r, y - r, x + r, y + r], fill=colour)


_PATTERNS = {"stripes": _paint_stripes, "checker": _paint_checker, "dots": _paint_dots}


def _paint_background(canvas: _Canvas, background: Background) -> None:
    colour = varied(COLOURS[background.colour], canvas.rng)
    second = varied(COLOURS[background.second], canvas.rng)
    if background.texture == "gradient":
        canvas.gradient(colour, second, canvas.height)
        return
    canvas.surface.rectangle([0, 0, canvas.width, canvas.height], fill=colour)
    if background.texture == "stars":
        canvas.stars(canvas.height)
    elif background.texture in _PATTERNS:
        _PATTERNS[background.texture](canvas, second)


def _paint_things(canvas: _Canvas, scene: Scene) -> None:
    for i, thing in enumerate(scene.things):
        smallest, largest = SIZES[thing.size]
        r = canvas.rng.uniform(smallest, largest)
        if scene.layout == "pair":
            r = canvas.rng.uniform(0.17, 0.2)
            x, y = (
                ((0.5, 0.27), (0.5, 0.74))[i]
                if scene.is_vertical
                else ((0.27, 0.5), (0.73, 0.5))[i]
            )
        else:
            x, y = POSITIONS[thing.position or "center"]
            if thing.position != "center":
                r = min(r, 0.24)
            elif thing.size == "":
                r *= 1.05
        cx, cy = x * canvas.width + canvas.jitter(0.02), y * canvas.height + canvas.jitter(0.02)
        colour = varied(COLOURS[thing.colour], canvas.rng)
        canvas.paint(thing.kind, cx, cy, r * canvas.unit, colour)


def _paint_sky(canvas: _Canvas, view: Landscape, horizon: float) -> None:
    top, bottom = _SKY[view.sky]
    canvas.gradient(top, bottom, horizon)
    if view.sky == "night":
        canvas.stars(horizon * 0.9)
    x = canvas.width * (0.22 if view.side == "left" else 0.78) + canvas.jitter(0.02)
    y, unit = canvas.height * 0.2, canvas.unit
    if view.above == "sun":
        canvas.paint("sun", x, y, unit * 0.12, varied(COLOURS["yellow"], canvas.rng))
    elif view.above == "moon":
        canvas.paint("moon", x, y, unit * 0.1, (250, 246, 220))
    elif view.above == "cloud":
        colour = (150, 155, 175) if view.sky == "night" else (250, 250, 250)
        canvas.paint("cloud", x, y, unit * 0.15, colour)


def _paint_mountains(canvas: _Canvas, horizon: float, light: float) -> None:
    rng, width, unit = canvas.rng, canvas.width, canvas.unit
    peaks = [
        (rng.uniform(0.15, 0.3), rng.uniform(0.3, 0.38), 0.3),
        (rng.uniform(0.65, 0.85), rng.uniform(0.26, 0.36), 0.34),
        (0.5, rng.uniform(0.2, 0.26), 0.26),
    ]
    for place, rise, half_width in peaks:
        x, tall, half = place * width, rise * unit, half_width * width
        rock = shade(varied((120, 124, 140), rng), light)
        canvas.surface.polygon(
            [(x - half, horizon), (x, horizon - tall), (x + half, horizon)], fill=rock
        )
        snow, edge = shade((246, 248, 252), max(light, 0.7)), horizon - tall * 0.72
        cap = [(x - half * 0.28, edge), (x, horizon - tall), (x + half * 0.28, edge)]
        canvas.surface.polygon(cap, fill=snow)


def _paint_waves(canvas: _Canvas, horizon: float, water: RGB) -> None:
    foam, deep, unit = mix(water, (255, 255, 255), 0.35), canvas.height - horizon, canvas.unit
    count = round(4 * canvas.width / unit)
    for row in range(3):
        y = horizon + deep * (0.25 + 0.28 * row)
        for i in range(count):
            x = unit * (i / 4 + 0.06 + 0.1 * (row % 2)) + canvas.jitter(0.016)
            canvas.surface.line([(x, y), (x + unit * 0.1, y)], fill=foam, width=round(unit * 0.018))


def _paint_landscape(canvas: _Canvas, scene: Scene, view: Landscape) -> None:
    horizon = canvas.height * canvas.rng.uniform(0.6, 0.66)
    light, unit, deep = _DAYLIGHT[view.sky], canvas.unit, canvas.height - horizon
    _paint_sky(canvas, view, horizon)
    ground = shade(varied(_GROUND[view.ground], canvas.rng), light)
    if view.ground == "mountains":
        _paint_mountains(canvas, horizon, light)
    canvas.surface.rectangle([0, horizon, canvas.width, canvas.height], fill=ground)
    if view.ground == "sea":
        _paint_waves(canvas, horizon, ground)
    places = (0.5,) if len(scene.things) == 1 else (0.28, 0.72)
    for thing, place in zip(scene.things, places):
        r = unit * _LANDSCAPE_RADIUS[thing.kind]
        x = canvas.width * place + canvas.jitter(0.03)
        on_ground = horizon + deep * 0.3 - r * 0.7
        y = {"boat": horizon - r * 0.3, "fish": horizon + deep * 0.55}.get(thing.kind, on_ground)
        canvas.paint(thing.kind, x, y, r, varied(COLOURS[thing.colour], canvas.rng))


def paint(scene: Scene, width: int = 128, height: int = 128) -> np.ndarray:
    """Paint `scene` as uint8 RGB [height, width, 3]; equal scenes give equal pixels."""
    canvas = _Canvas(width, height, random.Random(scene.seed * 7 + 1))
    if scene.landscape is not None:
        _paint_landscape(canvas, scene, scene.landscape)
    elif scene.background is not None:
        _paint_background(canvas, scene.background)
        _paint_things(canvas, scene)
    return np.asarray(canvas.image.reduce(SUPERSAMPLING))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Paint one scene.")
    parser.add_argument("seed", type=int, help="seed of the scene")
    parser.add_argument("--size", type=int, nargs=2, default=(128, 128), help="width and height")
    parser.add_argument("--out", type=Path, required=True, help="PNG to write")
    arguments = parser.parse_args()
    picture = paint(random_scene(arguments.seed), *arguments.size)
    Image.fromarray(picture).save(arguments.out, optimize=True)


if __name__ == "__main__":
    main()
